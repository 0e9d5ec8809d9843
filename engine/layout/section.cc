#include "engine/layout/section.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace sluice::engine {

Section::Section(const Layout& model, std::vector<UnitRange> cut, int section, bool has_copy)
    : model_(model), cut_(std::move(cut)), section_(section), has_copy_(has_copy) {
  UnitId end = 0;
  for (const UnitRange& units : cut_)
    ensure(units.first == std::exchange(end, units.end) && units.first < units.end,
           "a section begins with unit {}, and ends with {}", units.first, units.end);
  ensure(end == model.units().size() && section >= 0 && section < static_cast<int>(cut_.size()),
         "{} sections end with unit {} of {}", cut_.size(), end, model.units().size());
}

int Section::owner(UnitId of_model) const {
  const auto found = std::ranges::upper_bound(cut_, of_model, {}, &UnitRange::end);
  return static_cast<int>(found - cut_.begin());
}

std::optional<UnitId> Section::own(UnitId of_model) const {
  if (owner(of_model) != section_) return std::nullopt;
  return of_model - cut_[static_cast<std::size_t>(section_)].first + (has_copy_ ? 1 : 0);
}

ParameterId Section::of_model(ParameterId own) const {
  const ParameterId copied = has_copy_ ? model_.end_parameter(0) : 0;
  if (own < copied) return own;
  return own - copied + model_.first_parameter(cut_[static_cast<std::size_t>(section_)].first);
}

}  // namespace sluice::engine
