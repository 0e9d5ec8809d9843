#pragma once
#include <compare>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "comm/call.h"
#include "core/transfers.h"
#include "engine/layout/layout.h"
#include "offload/records.h"

namespace sluice::engine {

// A few *pieces* of memory into which parts of shards are brought, and from where ranks take them, each when
// it wants. Those that want the same part at about the same time share what brings it: it stays until its
// place is needed. Nobody keeps it for a rank that is late, for which it is brought again.
//
// A request waits for a free piece and for nothing else that waits itself. A piece is busy while it is
// filled, and while its bytes are copied or sent into memory that the reader holds already; threads of the
// disk and of the transport do that, which never wait for an engine. So each becomes free by itself, whatever
// the engines of this rank and of the others wait for, and however few pieces there are.
//
// Thread rule: start() comes first; then any thread.
class Pieces {
 public:
  static constexpr std::size_t kMostBytes = offload::RecordStore::kBlock;  // of a piece
  // Which part of a shard; it is the index-th of those of kMostBytes.
  struct Key {
    int owner = 0;  // the rank whose shard it is
    UnitId unit = 0;
    std::uint64_t version = 0;
    std::size_t index = 0;
    auto operator<=>(const Key&) const = default;
  };
  // Takes the bytes, or an error in their place, and calls `used` once it uses them no more.
  using Use = comm::Answer;
  static Use copy_to(std::span<std::byte> into, Done done);
  // Brings what the piece is to have; may throw instead of calling `done`. REQUIRES: it always ends.
  using Bring = std::function<void(const Key& key, std::byte* into, Done done)>;

  // count: how many there are; readers: how many ranks want each part.
  Pieces(std::size_t count, int readers, Bring bring)
      : readers_(readers), bring_(std::move(bring)), pieces_(count) {}
  ~Pieces();  // waits for everything that is under way
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;

  bool none() const { return pieces_.empty(); }
  // Takes the memory; no piece has more than `bytes`.
  void start(allocator::Ledger& ledger, std::size_t bytes = kMostBytes);
  // The pieces lie in memory of the caller's, one after another, which need not be the host's.
  void start(std::byte* memory, std::size_t bytes);
  // Another number of pieces of kMostBytes: the old memory is given back before the new is taken. REQUIRES:
  // all that was asked for has come to who asked.
  void resize(allocator::Ledger& ledger, std::size_t count);
  void read(const Key& key, std::size_t bytes, Use use);  // the first bytes of a part
  void forget(UnitId unit);                               // what was brought of it is out of date

  // A piece for other purposes; waits until one is free. It goes back when this is destroyed.
  class Loan;

 private:
  struct Request {
    std::size_t bytes;
    Use use;
  };
  struct Piece {
    std::byte* data = nullptr;
    std::optional<Key> key;   // what it has, or gets; nothing: nothing that may be read
    bool busy = false;        // it is being filled or lent
    int uses = 0;             // that have not ended
    int given = 0;            // how often its contents were given to a reader
    std::uint64_t since = 0;  // a number that grows with each part that is brought
  };

  Piece* free_piece();
  void advance();
  void on_brought(Piece& piece, std::exception_ptr error);
  void give(Piece& piece, const Request& request);
  void end_one();

  const int readers_;
  const Bring bring_;
  allocator::Region memory_;

  // mutex_ guards what follows. Who has made a piece busy, or uses it, may touch its bytes.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Piece> pieces_;
  std::map<Key, std::vector<Request>> requests_;  // that wait for their part
  std::deque<Key> unread_;                        // those of them that nobody brings yet, in order
  std::uint64_t brought_ = 0;
  std::size_t under_way_ = 0;  // requests, and parts that are brought, that have not ended
  bool advancing_ = false;     // a thread has parts brought, and looks again before it stops
};

class Pieces::Loan {
 public:
  explicit Loan(Pieces& pieces);
  ~Loan();
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;
  std::byte* data() const { return piece_->data; }

 private:
  Pieces& pieces_;
  Piece* piece_ = nullptr;
};

}  // namespace sluice::engine
