#pragma once
#include <memory>
#include <optional>

#include "core/serial_queue.h"
#include "engine/memory/device_work.h"
#include "engine/memory/host_records.h"
#include "engine/memory/parameter_shards.h"

namespace sluice::engine {

// Brings whole units to a GPU, of which each rank has a shard of the parameters in its host memory. A unit
// passes through registered host memory, piece by piece, on a thread of this class: while one piece is
// copied, the ranks send the next ones. A fetch has ended for the caller when its last copy is queued. Thread
// rule: start() comes before any fetch; then as Backing. REQUIRES: no fetch is under way when it ends.
class DeviceShards {
 public:
  // Both arguments outlive it.
  DeviceShards(ParameterShards& shards, DeviceWork& gpu) : shards_(shards), gpu_(gpu) {}
  static constexpr std::size_t bytes() { return kPieces * StoredShards::kPiece; }
  void start(allocator::Ledger& ledger);
  std::unique_ptr<Backing> make(UnitId unit);

 private:
  static constexpr std::size_t kPieces = 16;
  class Unit;
  void fetch(UnitId unit, std::uint64_t version, std::byte* to);
  std::byte* host(std::size_t piece) const { return memory_.data() + piece % kPieces * StoredShards::kPiece; }

  ParameterShards& shards_;
  DeviceWork& gpu_;
  RegisteredRegion memory_;
  std::size_t pieces_before_ = 0;  // of fetches that have ended
  std::optional<SerialQueue> queue_;
};

}  // namespace sluice::engine
