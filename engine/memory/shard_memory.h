#pragma once
#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "allocator/device_memory.h"
#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "core/bytes.h"
#include "engine/layout/layout.h"
#include "engine/memory/device_work.h"
#include "engine/memory/peer_memory.h"
#include "engine/memory/rank_memory.h"

namespace sluice::engine {

// Memory for this rank's shards of some units, one after another. Thread rule: start() comes first, then
// share(); then any thread, but nobody uses the memory during leave() and enter().
class ShardMemory {
 public:
  using Sizes = std::vector<std::optional<std::size_t>>;  // by unit, in bytes; nullopt: no shard here
  explicit ShardMemory(const Sizes& sizes) {
    for (const auto& size : sizes) {
      offsets_.push_back(size ? std::optional(bytes_) : std::nullopt);
      rooms_.push_back(room(size.value_or(0)));
      bytes_ += rooms_.back();
    }
  }
  static constexpr std::size_t kLine = 64;  // shards are aligned to it
  static constexpr std::size_t room(std::size_t bytes) { return round_up(bytes, kLine); }
  // capacity: the most bytes that shards will have here at any time, if that is more.
  void start(allocator::Ledger& ledger, allocator::Purpose purpose, std::size_t capacity = 0) {
    memory_ = {ledger, purpose, bytes_, capacity};
  }
  // Takes GPU memory instead, in which the GPU updates the shards. REQUIRES: no leave() or enter() follows.
  void start(allocator::Ledger& ledger, DeviceWork& gpu, allocator::Purpose purpose) {
    on_gpu_ = {ledger, gpu.device(), purpose, bytes_};
    for (UnitId unit = 0; unit < rooms_.size(); ++unit)
      if (has(unit) && rooms_[unit] > 0) gpu.add({data(unit), rooms_[unit]}, rooms_[unit]);
  }
  // Takes registered host memory instead, from which GPUs copy: this rank's, and after share() those of the
  // other ranks (RankMemory). REQUIRES: no leave() or enter() follows.
  void start(allocator::Ledger& ledger, Device& gpu, allocator::Purpose purpose, bool may_share) {
    beside_gpu_ = {ledger, gpu, purpose, bytes_, may_share};
  }
  // Takes GPU memory from which the GPUs of the other ranks copy after share().
  void start_among_gpus(allocator::Ledger& ledger, Device& gpu, allocator::Purpose purpose) {
    among_gpus_ = {ledger, gpu, purpose, std::max<std::size_t>(1, bytes_)};
  }
  // Collective. Throws Error(kIo) where GPUs cannot read each other's memory.
  void share(Ranks& ranks, const std::string& name);
  bool is_shared() const { return beside_gpu_.is_shared() || among_gpus_.is_shared(); }
  // A rank's memory at this offset. REQUIRES: is_shared().
  const std::byte* of(int rank, std::size_t offset) const {
    return (among_gpus_.is_shared() ? among_gpus_.of(rank) : beside_gpu_.of(rank)) + offset;
  }

  bool has(UnitId unit) const { return offsets_[unit].has_value(); }
  std::size_t offset(UnitId unit) const { return *offsets_[unit]; }  // REQUIRES: has(unit)
  std::byte* data(UnitId unit) const {                               // REQUIRES: has(unit)
    if (on_gpu_.size() > 0) return reinterpret_cast<std::byte*>(on_gpu_.address()) + offset(unit);
    if (among_gpus_.size() > 0) return among_gpus_.data() + offset(unit);
    return (beside_gpu_.data() != nullptr ? beside_gpu_.data() : memory_.data()) + offset(unit);
  }

  // Gives back the memory of these units' shards, and compacts the others in their order.
  void leave(const std::vector<UnitId>& units);
  // Takes memory for this unit's shard, with unspecified contents.
  void enter(UnitId unit, std::size_t bytes);

 private:
  std::vector<std::optional<std::size_t>> offsets_;  // by unit
  std::vector<std::size_t> rooms_;                   // by unit
  std::size_t bytes_ = 0;
  allocator::Region memory_;
  RankMemory beside_gpu_;
  allocator::DeviceRegion on_gpu_;
  PeerMemory among_gpus_;  // three of the four are empty
};

}  // namespace sluice::engine
