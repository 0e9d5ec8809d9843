#pragma once
#include <cstddef>
#include <optional>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "core/bytes.h"
#include "engine/layout/layout.h"

namespace sluice::engine {

// Memory for this rank's shards of some units, one after another. Thread rule: start() comes first; then any
// thread, but for leave() and enter(), beside which nobody uses the memory.
class ShardMemory {
 public:
  // sizes: by unit, in bytes; nothing: the unit has none here.
  explicit ShardMemory(const std::vector<std::optional<std::size_t>>& sizes) {
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
  bool has(UnitId unit) const { return offsets_[unit].has_value(); }
  std::byte* data(UnitId unit) const { return memory_.data() + *offsets_[unit]; }  // REQUIRES: has(unit)

  // Gives back the memory of these units' shards. What stays moves together, in the order in which it lies.
  void leave(const std::vector<UnitId>& units);
  // Takes memory for this unit's shard, whose contents are unspecified.
  void enter(UnitId unit, std::size_t bytes);

 private:
  std::vector<std::optional<std::size_t>> offsets_;  // by unit
  std::vector<std::size_t> rooms_;                   // by unit
  std::size_t bytes_ = 0;
  allocator::Region memory_;
};

}  // namespace sluice::engine
