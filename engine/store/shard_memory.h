#pragma once
#include <cstddef>
#include <optional>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "core/bytes.h"
#include "engine/layout.h"

namespace sluice::engine {

// Memory for this rank's shards of some units, one after another. Thread rule: start() comes first; then any
// thread.
class ShardMemory {
 public:
  // sizes: by unit, in bytes; nothing: the unit has none here.
  explicit ShardMemory(const std::vector<std::optional<std::size_t>>& sizes) {
    for (const auto& size : sizes) {
      offsets_.push_back(size ? std::optional(bytes_) : std::nullopt);
      bytes_ += room(size.value_or(0));
    }
  }
  static constexpr std::size_t kLine = 64;  // each shard begins at a multiple
  static constexpr std::size_t room(std::size_t bytes) { return round_up(bytes, kLine); }
  void start(allocator::Ledger& ledger, allocator::Purpose purpose) { memory_ = {ledger, purpose, bytes_}; }
  bool has(UnitId unit) const { return offsets_[unit].has_value(); }
  std::byte* data(UnitId unit) const { return memory_.data() + *offsets_[unit]; }  // REQUIRES: has(unit)

 private:
  std::vector<std::optional<std::size_t>> offsets_;  // by unit
  std::size_t bytes_ = 0;
  allocator::Region memory_;
};

}  // namespace sluice::engine
