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

// Memory for this rank's shards of some units, one after another. Thread rule: start() comes first, and
// share() next; then any thread, but for leave() and enter(), beside which nobody uses the memory.
class ShardMemory {
 public:
  using Sizes = std::vector<std::optional<std::size_t>>;  // by unit, in bytes; nothing: it has none here
  explicit ShardMemory(const Sizes& sizes) {
    for (const auto& size : sizes) {
      offsets_.push_back(size ? std::optional(bytes_) : std::nullopt);
      rooms_.push_back(room(size.value_or(0)));
      bytes_ += rooms_.back();
    }
  }
  static constexpr std::size_t kLine = 64;  // each shard begins at a multiple
  static constexpr std::size_t room(std::size_t bytes) { return round_up(bytes, kLine); }
  // capacity: the most bytes that shards will have here at any time, where that is more.
  void start(allocator::Ledger& ledger, allocator::Purpose purpose, std::size_t capacity = 0) {
    memory_ = {ledger, purpose, bytes_, capacity};
  }
  // Takes memory of a GPU instead, which computes with it. Nothing leaves it or enters it then.
  void start(allocator::Ledger& ledger, DeviceWork& gpu, allocator::Purpose purpose) {
    on_gpu_ = {ledger, gpu.device(), purpose, bytes_};
    for (UnitId unit = 0; unit < rooms_.size(); ++unit)
      if (has(unit) && rooms_[unit] > 0) gpu.add({data(unit), rooms_[unit]}, rooms_[unit]);
  }
  // Takes memory from which a GPU copies instead, and those of the other ranks where share() is called, too,
  // which is as RankMemory's. Nothing leaves it or enters it then.
  void start(allocator::Ledger& ledger, Device& gpu, allocator::Purpose purpose, bool may_share) {
    beside_gpu_ = {ledger, gpu, purpose, bytes_, may_share};
  }
  // Takes memory of a GPU from which the GPUs of the other ranks copy, when share() was called.
  void start_among_gpus(allocator::Ledger& ledger, Device& gpu, allocator::Purpose purpose) {
    among_gpus_ = {ledger, gpu, purpose, std::max<std::size_t>(1, bytes_)};
  }
  // Collective. Throws Error(kIo) where GPUs do not read each other's memory.
  void share(Ranks& ranks, const std::string& name);
  bool is_shared() const { return beside_gpu_.is_shared() || among_gpus_.is_shared(); }
  // What that rank has at this offset of its memory. REQUIRES: is_shared().
  const std::byte* of(int rank, std::size_t offset) const {
    return (among_gpus_.is_shared() ? among_gpus_.of(rank) : beside_gpu_.of(rank)) + offset;
  }

  bool has(UnitId unit) const { return offsets_[unit].has_value(); }
  std::size_t offset(UnitId unit) const { return *offsets_[unit]; }  // REQUIRES: has(unit)
  std::byte* data(UnitId unit) const {                               // REQUIRES: likewise
    if (on_gpu_.size() > 0) return reinterpret_cast<std::byte*>(on_gpu_.address()) + offset(unit);
    if (among_gpus_.size() > 0) return among_gpus_.data() + offset(unit);
    return (beside_gpu_.data() != nullptr ? beside_gpu_.data() : memory_.data()) + offset(unit);
  }

  // Gives back the memory of these units' shards. What stays moves together, in the order in which it lies.
  void leave(const std::vector<UnitId>& units);
  // Takes memory for this unit's shard, whose contents are unspecified.
  void enter(UnitId unit, std::size_t bytes);

 private:
  std::vector<std::optional<std::size_t>> offsets_;  // by unit
  std::vector<std::size_t> rooms_;                   // by unit
  std::size_t bytes_ = 0;
  allocator::Region memory_;
  RankMemory beside_gpu_;
  allocator::DeviceRegion on_gpu_;
  PeerMemory among_gpus_;  // all but one of the four are empty
};

}  // namespace sluice::engine
