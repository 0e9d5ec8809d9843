#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "comm/call.h"
#include "core/bytes.h"
#include "engine/layout.h"
#include "engine/store/backing.h"

namespace sluice::engine {

// This rank's shards of parameters that are on disk. They are read a *piece* at a time, into a few pieces of
// memory, from where this rank and all others take them. Ranks that read the same piece at about the same
// time share one read of the disk: a piece stays in memory until another one needs its place.
//
// A read waits for a free piece of memory and for nothing else that waits itself. A piece of memory is busy
// while the disk fills it, and while its bytes are copied or sent into memory that the reader holds already;
// threads of the disk and of the transport do that, which never wait for an engine. So each becomes free by
// itself, whatever the engines of this rank and of the others wait for, and however little memory there is.
//
// Thread rule: define() and start() come first; then any thread.
class StoredShards {
 public:
  static constexpr std::size_t kPiece = offload::RecordStore::kBlock;
  static constexpr std::size_t kFewestPieces = 4;
  static std::size_t backing_bytes(std::size_t shard_bytes) { return round_up(shard_bytes, kDiskBlock); }
  // Takes the bytes, or an error in their place, and calls `used` once it uses them no more.
  using Use = comm::Answer;

  // pieces: how many there are in memory; readers: how many ranks read each piece, this one among them.
  StoredShards(std::size_t units, std::size_t pieces, int readers);
  ~StoredShards();  // waits for everything that is under way
  StoredShards(const StoredShards&) = delete;
  StoredShards& operator=(const StoredShards&) = delete;

  // REQUIRES: bytes > 0; before Backings::allocate().
  void define(UnitId unit, const std::string& name, std::size_t bytes, Backings& backings);
  void start(allocator::Ledger& ledger);  // takes the memory
  // Another number of pieces: the old memory is given back before the new is taken. REQUIRES: nobody reads.
  void set_pieces(allocator::Ledger& ledger, std::size_t pieces);
  void undefine(UnitId unit) { shards_[unit] = {}; }  // a shard that could not be allocated

  bool has(UnitId unit) const { return shards_[unit].backing != nullptr; }
  // REQUIRES, for all below: has(unit).
  // Bytes of one piece: `offset` is a multiple of kPiece.
  void read(UnitId unit, std::size_t offset, std::size_t bytes, Use use);
  // Copies bytes of the shard, of one piece or of several; does not wait.
  void copy(UnitId unit, std::size_t offset, std::span<std::byte> into, Done done);
  void write(UnitId unit, const std::byte* values);  // the whole shard; waits
  // Writes or reads the whole shard through a piece of the caller's memory, and waits. REQUIRES: nobody reads
  // it meanwhile.
  void write_through(UnitId unit, const std::byte* values, std::byte* piece);
  void read_through(UnitId unit, std::byte* values, std::byte* piece) const;
  // For who updates the shard where it is. REQUIRES: nobody reads it meanwhile, and forget() follows.
  Backing& backing(UnitId unit) const { return *shards_[unit].backing; }
  void forget(UnitId unit);  // what was read of it is out of date

 private:
  using Key = std::pair<UnitId, std::size_t>;  // which piece of a shard
  struct Shard {
    std::size_t bytes = 0;
    std::unique_ptr<Backing> backing;
  };
  struct Request {
    std::size_t bytes;
    Use use;
  };
  struct Piece {
    std::byte* data = nullptr;
    std::optional<Key> key;   // what it has, or gets; nothing: nothing that may be read
    bool busy = false;        // it is being filled or written
    int uses = 0;             // that have not ended
    int given = 0;            // how often its contents were given to a reader
    std::uint64_t since = 0;  // a number that grows with each read of the disk
  };

  std::size_t piece_bytes(const Key& key) const;
  Piece* free_piece();
  void advance();
  void on_read(Piece& piece, std::exception_ptr error);
  void give(Piece& piece, const Request& request);
  void write_piece(UnitId unit, std::size_t index, const std::byte* values);
  void store_piece(const Key& key, const std::byte* values, std::byte* piece);
  void end_one();

  const int readers_;
  std::vector<Shard> shards_;  // by unit
  allocator::Region memory_;

  // mutex_ guards what follows. Who has made a piece busy, or uses it, may touch its bytes.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Piece> pieces_;
  std::map<Key, std::vector<Request>> requests_;  // that wait for the disk
  std::deque<Key> unread_;                        // those of them for which no read has begun, in order
  std::uint64_t reads_ = 0;
  std::size_t under_way_ = 0;  // requests, and reads of the disk, that have not ended
  bool advancing_ = false;     // a thread begins reads, and looks again before it stops
};

}  // namespace sluice::engine
