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
#include "engine/memory/device_work.h"
#include "engine/memory/pieces.h"
#include "engine/memory/rank_memory.h"

namespace sluice::engine {

// This rank's shards of parameters on disk. They are read in pieces (Pieces), from which this rank and all
// others take them. Where GPUs compute, the pieces are in registered memory, which the ranks of one host
// share (RankMemory): each rank's GPU copies from there.
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
  // The same where GPUs compute. may_share: whether share() will be called. Both arguments outlive this.
  void start_beside_gpu(allocator::Ledger& ledger, DeviceWork& gpu, bool may_share);
  // Collective. pieces: how many each rank has.
  void share(Ranks& ranks, const std::vector<std::size_t>& pieces);
  bool is_shared() const { return memory_.is_shared(); }
  std::size_t pieces() const { return count_; }
  // The memory of this rank's pieces; and an offset in that of any rank. REQUIRES, for the latter:
  // is_shared().
  const std::byte* memory() const { return memory_.data(); }
  const std::byte* of(int rank, std::uint64_t offset) const { return memory_.of(rank) + offset; }
  // Changes the number of pieces; gives the old memory back before taking the new. REQUIRES: nobody reads.
  void set_pieces(allocator::Ledger& ledger, std::size_t pieces) { pieces_.resize(ledger, pieces); }
  void undefine(UnitId unit) { shards_[unit] = {}; }  // for a record that could not be allocated

  bool has(UnitId unit) const { return shards_[unit].record != nullptr; }
  // REQUIRES, for all below: has(unit).
  // Reads bytes of one piece: `offset` is a multiple of kPiece. REQUIRES: the shard is that version.
  void read(UnitId unit, std::uint64_t version, std::size_t offset, std::size_t bytes, Pieces::Use use);
  // Copies bytes of the shard, from one piece or several; does not wait. REQUIRES: as read().
  void copy(UnitId unit, std::uint64_t version, std::size_t offset, std::span<std::byte> into, Done done);
  // Writes from a piece's beginning to a piece's end, or the shard's; waits.
  void write(UnitId unit, std::size_t offset, std::span<const std::byte> values);
  // Writes or reads the whole shard through a piece of the caller's memory, and waits. `moved` is called
  // after each piece. REQUIRES: nobody reads the shard meanwhile.
  void write_through(UnitId unit, const std::byte* values, std::byte* piece,
                     const std::function<void()>& moved);
  void read_through(UnitId unit, std::byte* values, std::byte* piece,
                    const std::function<void()>& moved) const;
  // For updating the shard in place, by the CPU. REQUIRES: nobody reads it meanwhile.
  Backing& backing(UnitId unit) const;

 private:
  struct Shard {
    std::size_t bytes = 0;
    std::unique_ptr<Backing> record;
  };
  std::size_t piece_bytes(UnitId unit, std::size_t index) const;
  void store_piece(UnitId unit, std::size_t index, const std::byte* values, std::byte* piece);

  const std::size_t count_;    // of the first plan
  DeviceWork* gpu_ = nullptr;  // null: the CPU computes
  RankMemory memory_;          // empty: likewise
  std::vector<Shard> shards_;  // by unit
  Pieces pieces_;
};

}  // namespace sluice::engine
