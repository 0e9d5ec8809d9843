#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "core/bytes.h"
#include "engine/layout/layout.h"
#include "engine/memory/backing.h"
#include "engine/memory/pieces.h"

namespace sluice::engine {

// This rank's shards of parameters on disk. They are read in pieces (Pieces), from which this rank and all
// others take them.
//
// Thread rule: define() and start() come first; then any thread.
class StoredShards {
 public:
  static constexpr std::size_t kPiece = Pieces::kMostBytes;
  static constexpr std::size_t kFewestPieces = 4;
  static std::size_t backing_bytes(std::size_t shard_bytes) { return round_up(shard_bytes, kDiskBlock); }

  // pieces: how many are in memory; readers: how many ranks read each piece, this one included.
  StoredShards(std::size_t units, std::size_t pieces, int readers);
  StoredShards(const StoredShards&) = delete;
  StoredShards& operator=(const StoredShards&) = delete;

  // REQUIRES: bytes > 0; before Backings::allocate().
  void define(UnitId unit, const std::string& name, std::size_t bytes, Backings& backings);
  void start(allocator::Ledger& ledger) { pieces_.start(ledger); }  // takes the memory
  // Changes the number of pieces; gives the old memory back before taking the new. REQUIRES: nobody reads.
  void set_pieces(allocator::Ledger& ledger, std::size_t pieces) { pieces_.resize(ledger, pieces); }
  void undefine(UnitId unit) { shards_[unit] = {}; }  // for a record that could not be allocated

  bool has(UnitId unit) const { return shards_[unit].backing != nullptr; }
  // REQUIRES, for all below: has(unit).
  // Reads bytes of one piece: `offset` is a multiple of kPiece.
  void read(UnitId unit, std::size_t offset, std::size_t bytes, Pieces::Use use);
  // Copies bytes of the shard, from one piece or several; does not wait.
  void copy(UnitId unit, std::size_t offset, std::span<std::byte> into, Done done);
  void write(UnitId unit, const std::byte* values);  // the whole shard; waits
  // Writes or reads the whole shard through a piece of the caller's memory, and waits. `moved` is called
  // after each piece. REQUIRES: nobody reads the shard meanwhile.
  void write_through(UnitId unit, const std::byte* values, std::byte* piece,
                     const std::function<void()>& moved);
  void read_through(UnitId unit, std::byte* values, std::byte* piece,
                    const std::function<void()>& moved) const;
  // For updating the shard in place. REQUIRES: nobody reads it meanwhile, and forget() follows.
  Backing& backing(UnitId unit) const { return *shards_[unit].backing; }
  void forget(UnitId unit) { pieces_.forget(unit); }  // drops pieces that are out of date

 private:
  struct Shard {
    std::size_t bytes = 0;
    std::unique_ptr<Backing> backing;
  };
  std::size_t piece_bytes(UnitId unit, std::size_t index) const;
  void write_piece(UnitId unit, std::size_t index, const std::byte* values);
  void store_piece(UnitId unit, std::size_t index, const std::byte* values, std::byte* piece);

  std::vector<Shard> shards_;  // by unit
  Pieces pieces_;
};

}  // namespace sluice::engine
