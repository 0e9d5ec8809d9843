#pragma once
#include <memory>
#include <optional>

#include "core/serial_queue.h"
#include "engine/memory/device_work.h"
#include "engine/memory/host_records.h"
#include "engine/memory/parameter_shards.h"

namespace sluice::engine {

// All-gathers partitioned units into GPU memory, on threads of this class. On one host the ranks share the
// memory of their shards: the GPU copies each shard from its owner's memory once the owner has published the
// version; or piece by piece from memory that the owner lends, into which its GPU (PassedShards) or the disk
// (StoredShards) brings the pieces. Otherwise shards are sent, and pass through registered memory in pieces:
// one piece is copied while the next ones arrive. A fetch completes for its caller when its last copy is
// queued. So this rank calls await() before it lets others change a unit: if it computes no gradient of the
// unit, nothing else keeps its queued copy from reading the next version. Thread rule: start() and share()
// come before any fetch; then as Backing. REQUIRES: no fetch is in flight when it is destroyed.
class DeviceShards {
 public:
  // Both arguments outlive it.
  DeviceShards(ParameterShards& shards, DeviceWork& gpu) : shards_(shards), gpu_(gpu) {}
  // Registered host memory through which sent shards pass, where ranks are on several hosts.
  static constexpr std::size_t bytes() { return kPieces * StoredShards::kPiece; }
  void start(allocator::Ledger& ledger);  // the ledger outlives it; after ParameterShards::start()
  // Collective. Where ranks of one host cannot share memory, it takes the staging memory that sending needs.
  void share();
  std::unique_ptr<Backing> make(UnitId unit);
  // Waits until the GPU has copied what was fetched of the unit. REQUIRES: no fetch of it is in flight.
  void await(UnitId unit);

 private:
  static constexpr std::size_t kPieces = 16;
  class Unit;
  void take_staging();
  // A unit's pieces, of at most so many bytes, that their owners lend, or those that they do not.
  std::vector<ParameterShards::Piece> pieces_of(UnitId unit, bool lent, std::size_t most) const;
  // Shards that this rank's GPU copies from their owners' memory.
  std::vector<ParameterShards::Piece> shards_of(UnitId unit) const;
  void fetch(UnitId unit, std::uint64_t version, std::span<std::byte> into, Done done);
  void copy(UnitId unit, std::uint64_t version, std::byte* to);
  void ask(UnitId unit, std::uint64_t version, std::span<std::byte> into, Done done);
  void borrow(UnitId unit, std::uint64_t version, std::byte* to, Done done);
  void copy_borrowed(std::byte* to, DeviceWork::Memory from, Done done, Done used);
  void receive(UnitId unit, std::uint64_t version, std::byte* to);
  std::byte* host(std::size_t piece) const { return memory_.data() + piece % kPieces * StoredShards::kPiece; }

  ParameterShards& shards_;
  DeviceWork& gpu_;
  allocator::Ledger* ledger_ = nullptr;
  RegisteredRegion memory_;
  std::size_t pieces_before_ = 0;  // of all fetches so far
  std::optional<SerialQueue> queue_;
  // Where ranks lend. They wait for copies out of borrowed memory, then return it; copy what was borrowed,
  // whatever units in queue_ wait for; and wait until a unit's memory is free, then ask for its pieces.
  std::optional<SerialQueue> returning_, copying_, asking_;
};

}  // namespace sluice::engine
