#pragma once
#include <memory>
#include <optional>

#include "core/serial_queue.h"
#include "engine/memory/device_work.h"
#include "engine/memory/host_records.h"
#include "engine/memory/parameter_shards.h"

namespace sluice::engine {

// Brings whole units to a GPU, of which each rank has a shard of the parameters, on threads of this class.
// Ranks of one host share the memory of shards: the GPU copies each from where its owner has it, once that
// one says that it has the version; or from the owner's GPU, which brings it there (PassedShards). Otherwise
// shards are sent, and pass through registered memory, piece by piece: while one piece is copied, the ranks
// send the next ones. A fetch has ended for the caller when its last copy is queued. So await() comes before
// this rank lets others change a unit: a unit that was fetched, and of which this rank has no gradient, would
// be copied when it has changed. Thread rule: start() and share() come before any fetch; then as Backing.
// REQUIRES: no fetch is under way when it ends.
class DeviceShards {
 public:
  // Both arguments outlive it.
  DeviceShards(ParameterShards& shards, DeviceWork& gpu) : shards_(shards), gpu_(gpu) {}
  // Of host memory through which shards pass that are sent: those of ranks of several hosts.
  static constexpr std::size_t bytes() { return kPieces * StoredShards::kPiece; }
  void start(allocator::Ledger& ledger);  // which outlives it; after ParameterShards::start()
  // Collective. Where ranks of one host cannot share their memory, it takes what ranks of several hosts have.
  void share();
  std::unique_ptr<Backing> make(UnitId unit);
  // Waits until the GPU has copied what was fetched of the unit. REQUIRES: no fetch of it is under way.
  void await(UnitId unit);

 private:
  static constexpr std::size_t kPieces = 16;
  class Unit;
  void take_staging();
  std::vector<ParameterShards::Piece> shards_of(UnitId unit) const;
  void fetch(UnitId unit, std::uint64_t version, std::byte* to);
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
  std::size_t pieces_before_ = 0;         // of fetches that have ended
  std::optional<SerialQueue> returning_;  // waits for copies of what is borrowed, and gives it back
  std::optional<SerialQueue> queue_;
  std::optional<SerialQueue> asking_;  // waits until a unit's memory is free, and asks for its parts then
};

}  // namespace sluice::engine
