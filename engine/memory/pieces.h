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

// A few *pieces* of memory (buffers), into which parts of shards are brought and from which ranks take them.
// Requests for the same part at about the same time share one transfer: the part stays until its piece is
// needed. It is not kept for a late rank; a late request brings it again.
//
// No deadlock: a request waits only for a free piece. A piece is busy while it is filled, and while its bytes
// are copied or sent into memory that the reader already holds; threads of the disk and the transport do
// that, which never wait for an engine. So each piece becomes free whatever the engines of the ranks wait
// for, and however few pieces there are.
//
// Thread rule: start() comes first; then any thread.
class Pieces {
 public:
  static constexpr std::size_t kMostBytes = offload::RecordStore::kBlock;  // of a piece
  // Identifies a part of a shard: the index-th of kMostBytes.
  struct Key {
    int owner = 0;  // the rank whose shard it is
    UnitId unit = 0;
    std::uint64_t version = 0;
    std::size_t index = 0;
    auto operator<=>(const Key&) const = default;
  };
  // Receives the bytes, or an error instead, and calls `used` once it no longer uses them.
  using Use = comm::Answer;
  static Use copy_to(std::span<std::byte> into, Done done);
  // Brings a part into a piece; may throw instead of calling `done`. REQUIRES: it always completes.
  using Bring = std::function<void(const Key& key, std::byte* into, Done done)>;

  // count: the number of pieces; readers: how many ranks read each part.
  Pieces(std::size_t count, int readers, Bring bring)
      : readers_(readers), bring_(std::move(bring)), pieces_(count) {}
  ~Pieces();  // waits until everything in flight has completed
  Pieces(const Pieces&) = delete;
  Pieces& operator=(const Pieces&) = delete;

  bool none() const { return pieces_.empty(); }
  // Takes the memory; no piece has more than `bytes`.
  void start(allocator::Ledger& ledger, std::size_t bytes = kMostBytes);
  // The pieces are consecutive in memory of the caller's, which may be GPU memory.
  void start(std::byte* memory, std::size_t bytes);
  // Changes the number of pieces, of kMostBytes; gives the old memory back before taking the new. REQUIRES:
  // all requests were answered.
  void resize(allocator::Ledger& ledger, std::size_t count);
  void read(const Key& key, std::size_t bytes, Use use);  // the first `bytes` bytes of a part

  // Lends a piece for other purposes, until it is destroyed; the constructor waits until one is free.
  class Loan;

 private:
  struct Request {
    std::size_t bytes;
    Use use;
  };
  struct Piece {
    std::byte* data = nullptr;
    std::optional<Key> key;   // its contents, or ones that are on the way; nullopt: nothing readable
    bool busy = false;        // being filled or lent
    int uses = 0;             // in progress
    int given = 0;            // how often its contents were given to readers
    std::uint64_t since = 0;  // the serial number of the transfer that filled it
  };

  Piece* free_piece();
  void advance();
  void on_brought(Piece& piece, std::exception_ptr error);
  void give(Piece& piece, const Request& request);
  void end_one();

  const int readers_;
  const Bring bring_;
  allocator::Region memory_;

  // mutex_ guards what follows. Whoever has made a piece busy, or uses it, may touch its bytes.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Piece> pieces_;
  std::map<Key, std::vector<Request>> requests_;  // waiting for their part
  std::deque<Key> unread_;                        // requested parts that are not being brought yet, in order
  std::uint64_t brought_ = 0;
  std::size_t under_way_ = 0;  // requests, and transfers into pieces, that have not ended
  bool advancing_ = false;     // a thread is in advance(), and will look again before it leaves
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
