#include "engine/steps/turns.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace sluice::engine {

Turns::Turns(const Layout& layout)
    : order_(layout.units().size()), trained_(layout.units().size()), came_(layout.units().size()) {
  std::iota(order_.rbegin(), order_.rend(), UnitId{0});
  for (UnitId unit = 0; unit < trained_.size(); ++unit) trained_[unit] = layout.trainable(unit);
  expected_ = had_ = trained_;
}

void Turns::note(UnitId unit) {
  if (came_[unit] == 0) came_[unit] = ++count_;
}

void Turns::forget_all() {
  std::ranges::fill(came_, 0);
  count_ = 0;
}

void Turns::follow(const std::vector<std::uint32_t>& of_first, bool reversed) {
  std::vector<UnitId> seen;
  std::ranges::copy_if(order_, std::back_inserter(seen), [&](UnitId unit) { return of_first[unit] > 0; });
  std::ranges::sort(seen, {}, [&](UnitId unit) { return of_first[unit]; });
  if (reversed) std::ranges::reverse(seen);
  auto next = seen.begin();
  for (UnitId& unit : order_)
    if (of_first[unit] > 0) unit = *next++;
}

void Turns::expect(const std::vector<bool>& came, bool anew) {
  if (std::ranges::count(came, true) == 0) return;
  const bool adds = std::exchange(has_learned_, true) && !anew;
  for (UnitId unit = 0; unit < came.size(); ++unit) expected_[unit] = came[unit] || (adds && expected_[unit]);
}

void Turns::begin() {
  ahead_.clear();
  for (auto unit = order_.rbegin(); unit != order_.rend(); ++unit)
    if (expected_[*unit]) ahead_.push_back(*unit);
  had_ = expected_;
}

void Turns::insert(UnitId unit) {
  const auto place = [this](UnitId of) { return std::ranges::find(order_, of); };
  if (had_[unit]) ahead_.push_back(unit);
  for (auto each = order_.begin(); !had_[unit]; ++each) {
    if (!trained_[*each] || had_[*each]) continue;
    ahead_.push_back(*each);
    had_[*each] = true;
  }
  std::ranges::stable_sort(ahead_, std::ranges::greater(), place);
}

std::vector<UnitId> Turns::all() const {
  std::vector<UnitId> units = order_;
  std::ranges::stable_partition(units, [this](UnitId unit) { return expected_[unit]; });
  return units;
}

}  // namespace sluice::engine
