#include <algorithm>

#include "engine/plan/placement.h"
#include "engine/plan/rows_of_tokens.h"

// What a rank receives from the others in a step.
namespace sluice::engine {

bool Placement::sums_early(UnitId unit, const UnitPlan& plan, int use) const {
  const std::vector<std::size_t>& writes = units_[unit].at.last_writes;
  const auto at = static_cast<std::size_t>(use);
  return !profile_.any_order && plan.resident(Part::kGradient) && at < writes.size() &&
         writes[at] < units_[unit].at.last;
}

Placement::Received Placement::received(UnitId unit, const UnitPlan& plan, std::size_t groups) const {
  Received received;
  if (ranks_.size == 1) return received;
  const ElementRange own = format_.shards().here(unit);
  const std::size_t others = layout_.unit_elements(unit) - own.size();
  if (plan.tier(Part::kParameters) == allocator::Tier::kRanks)
    received.parameters = units_[unit].at.fetches * groups * others * size_of(layout_.dtype(unit));
  if (!updated(unit)) return received;
  for (int use = 0; use < (profile_.any_order ? 1 : uses_[unit]); ++use)
    (sums_early(unit, plan, use) ? received.early : received.gradient) += received_of_sum(unit, use);
  if (stages_[unit] > 0 && plan.tier(Part::kParameters) != allocator::Tier::kRanks)
    received.updated = others * size_of(layout_.dtype(unit));
  return received;
}

// The sum of the rank's own part takes what the others have of it. Where nothing is partitioned,
// the other parts come when they are summed.
std::uint64_t Placement::received_of_sum(UnitId unit, int use) const {
  const auto ranks = static_cast<std::size_t>(ranks_.size), rank = static_cast<std::size_t>(ranks_.rank);
  if (stages_[unit] > 0)
    return sent_elements(unit, use, format_.shards().here(unit)) * arrays_of_others_ * sizeof(float);
  const std::size_t sent = sent_elements(unit, use, {0, layout_.unit_elements(unit)});
  const std::size_t part = sent / ranks + (rank < sent % ranks ? 1 : 0);
  return (part * arrays_of_others_ + sent - part) * sizeof(float);
}

// How many of these elements of a unit are in sums of that use, at most.
std::size_t Placement::sent_elements(UnitId unit, int use, const ElementRange& of) const {
  std::size_t sent = in_use(layout_, unit, use, of.end) - in_use(layout_, unit, use, of.begin);
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p) {
    const ParameterSpec& spec = layout_.spec(p);
    const std::optional<std::size_t> rows = rows_of_tokens(spec, use, ranks_, profile_);
    if (!rows) continue;
    const std::size_t begin = layout_.location(p).offset, end = begin + layout_.location(p).elements;
    const std::size_t whole = std::clamp(of.end, begin, end) - std::clamp(of.begin, begin, end);
    sent -= whole - std::min(whole, *rows * (spec.elements() / spec.shape.front()));
  }
  return sent;
}

}  // namespace sluice::engine
