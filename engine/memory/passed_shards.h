#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

#include "allocator/ledger.h"
#include "comm/communicator.h"
#include "core/serial_queue.h"
#include "engine/layout/shards.h"
#include "engine/memory/device_work.h"
#include "engine/memory/peer_memory.h"
#include "engine/memory/pieces.h"

namespace sluice::engine {

// This rank's shards of parameters in host memory, which its GPU copies over its own link into a few places
// of its memory (Pieces). From there the GPUs of all ranks of one host copy them. A rank borrows the place of
// a part of a shard, and returns it when its GPU has copied the part. Thread rule: start() and share() come
// first; then any thread.
class PassedShards {
 public:
  static constexpr std::size_t kMostBytes = std::size_t{32} << 20;  // per place
  // The places of a rank suffice for the shards of a few of its largest units, so that ranks which are ahead
  // of others by a unit, and prefetch, find free places beside those that the others still need.
  struct Need {
    std::size_t places = 0;
    std::size_t bytes = 0;  // per place, the same on all ranks
  };
  // For one unit. `all` has the shards of all ranks.
  static Need need_of(const Layout& layout, const Shards& all, UnitId unit, int rank, int ranks);

  // Returns the memory of this rank's own shard of a unit.
  using Source = std::function<std::span<const std::byte>(UnitId unit)>;
  PassedShards(const Need& need, int ranks, Source source);
  ~PassedShards() = default;  // REQUIRES: nothing is lent
  PassedShards(const PassedShards&) = delete;
  PassedShards& operator=(const PassedShards&) = delete;

  // Takes the memory of the places. REQUIRES: the memory of the shards was added to the GPU. Both arguments
  // outlive it.
  void start(allocator::Ledger& ledger, DeviceWork& gpu);
  // Collective. Throws Error(kIo) where GPUs do not read each other's memory.
  void share(comm::Communicator& communicator, const std::string& name);

  // Lends the place of a part of this rank's shard: `bytes` from `offset` on, a multiple of kMostBytes;
  // `bytes` is kMostBytes or what is left of the shard. REQUIRES: the shard is that version until the place
  // is lent.
  void lend(UnitId unit, std::uint64_t version, std::size_t offset, std::size_t bytes, Pieces::Use use);
  // The memory of this rank's places; and an offset in that of another one, as an address of this rank's GPU.
  // REQUIRES, for the latter: share() was called.
  const std::byte* places() const { return places_.data(); }
  const std::byte* of(int rank, std::uint64_t offset) const { return places_.of(rank) + offset; }

 private:
  void bring(const Pieces::Key& key, std::byte* into, Done done);

  const Need need_;
  const Source source_;
  DeviceWork* gpu_ = nullptr;
  PeerMemory places_;

  // Destroyed first: pieces_ waits until bringing_ has brought what was requested.
  std::optional<SerialQueue> bringing_;
  Pieces pieces_;
};

}  // namespace sluice::engine
