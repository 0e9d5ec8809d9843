#pragma once
#include <cstddef>
#include <optional>
#include <vector>

#include "allocator/device_memory.h"
#include "engine/layout/layout.h"

namespace sluice::engine {

// Where tensors of a GPU's units point while their unit is not held. A home keeps its mapping when its unit
// goes, and then shows what another unit has in the same frames. So each unit also has addresses that show
// NaN for ever, and are no other unit's: who reads there gets NaN, and the address says of which unit. Thread
// rule: it does not change after start().
class AbsentUnits {
 public:
  explicit AbsentUnits(const Layout& layout);
  void start(allocator::Ledger& ledger, Device& device, std::size_t extent_bytes);  // of the memory it takes
  const std::byte* address(UnitId unit) const { return begin() + offsets_[unit]; }
  std::optional<UnitId> unit_at(const std::byte* address) const;

 private:
  const std::byte* begin() const { return reinterpret_cast<const std::byte*>(nan_.address()); }
  std::vector<std::size_t> offsets_;  // by unit, and the end of all
  allocator::DeviceNan nan_;
};

}  // namespace sluice::engine
