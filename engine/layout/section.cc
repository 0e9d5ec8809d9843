#include "engine/layout/section.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace sluice::engine {

Section::Section(const Layout& model, std::vector<UnitRange> cut, int sections, int section, bool has_copy)
    : model_(model), cut_(std::move(cut)), sections_(sections), section_(section), has_copy_(has_copy) {
  UnitId end = 0;
  for (const UnitRange& units : cut_)
    ensure(units.first == std::exchange(end, units.end) && units.first < units.end,
           "a section begins with unit {}, and ends with {}", units.first, units.end);
  ensure(end == model.units().size() && sections > 0 &&
             cut_.size() % static_cast<std::size_t>(sections) == 0 && section >= 0 && section < sections,
         "{} ranges of {} sections end with unit {} of {}", cut_.size(), sections, end, model.units().size());
}

std::size_t Section::range_of(UnitId of_model) const {
  const auto found = std::ranges::upper_bound(cut_, of_model, {}, &UnitRange::end);
  return static_cast<std::size_t>(found - cut_.begin());
}

int Section::owner(UnitId of_model) const { return static_cast<int>(range_of(of_model)) % sections_; }

std::optional<UnitId> Section::own(UnitId of_model) const {
  if (owner(of_model) != section_) return std::nullopt;
  const std::size_t range = range_of(of_model);
  UnitId before = has_copy_ ? 1 : 0;
  for (auto at = static_cast<std::size_t>(section_); at < range; at += static_cast<std::size_t>(sections_))
    before += static_cast<UnitId>(cut_[at].size());
  return before + of_model - cut_[range].first;
}

ParameterId Section::of_model(ParameterId own) const {
  const ParameterId copied = has_copy_ ? model_.end_parameter(0) : 0;
  if (own < copied) return own;
  ParameterId left = own - copied;
  for (auto at = static_cast<std::size_t>(section_); at < cut_.size();
       at += static_cast<std::size_t>(sections_)) {
    const ParameterId first = model_.first_parameter(cut_[at].first);
    const ParameterId parameters = model_.end_parameter(cut_[at].end - 1) - first;
    if (left < parameters) return first + left;
    left -= parameters;
  }
  fail(ErrorCode::kInternal, "section {} of {} has no parameter {}", section_, sections_, own);
}

}  // namespace sluice::engine
