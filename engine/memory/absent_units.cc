#include "engine/memory/absent_units.h"

#include <algorithm>

#include "core/bytes.h"

namespace sluice::engine {

AbsentUnits::AbsentUnits(const Layout& layout) : offsets_(1) {
  for (UnitId unit = 0; unit < layout.units().size(); ++unit)
    offsets_.push_back(offsets_.back() + round_up(layout.unit_bytes(unit), kDiskBlock));
}

void AbsentUnits::start(allocator::Ledger& ledger, Device& device, std::size_t extent_bytes) {
  nan_ = {ledger, device, allocator::Purpose::kParameter, offsets_.back(), extent_bytes};
}

std::optional<UnitId> AbsentUnits::unit_at(const std::byte* address) const {
  if (address < begin() || address >= begin() + offsets_.back()) return std::nullopt;
  const auto next = std::ranges::upper_bound(offsets_, static_cast<std::size_t>(address - begin()));
  return static_cast<UnitId>(next - offsets_.begin() - 1);
}

}  // namespace sluice::engine
