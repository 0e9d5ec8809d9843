#include "engine/plan/placement.h"

// What a rank receives from the others in a step.
namespace sluice::engine {

Placement::Received Placement::received(UnitId unit, const UnitPlan& plan, std::size_t groups) const {
  Received received;
  if (ranks_.size == 1) return received;
  const ElementRange own = format_.shards().here(unit);
  const std::size_t others = layout_.unit_elements(unit) - own.size();
  if (plan.tier(Part::kParameters) == allocator::Tier::kRanks)
    received.parameters = units_[unit].at.fetches * groups * others * size_of(layout_.dtype(unit));
  if (!updated(unit)) return received;
  for (int use = 0; use < (sums_.pairwise() ? uses_[unit] : 1); ++use)
    received.gradient += received_of_sum(unit, use);
  if (stage_ > 0 && plan.tier(Part::kParameters) != allocator::Tier::kRanks)
    received.updated = others * size_of(layout_.dtype(unit));
  return received;
}

// The sum of the rank's own part takes what the others have of it. Where nothing is partitioned,
// the other parts come when they are summed.
std::uint64_t Placement::received_of_sum(UnitId unit, int use) const {
  const auto ranks = static_cast<std::size_t>(ranks_.size), rank = static_cast<std::size_t>(ranks_.rank);
  if (stage_ > 0) {
    const ElementRange own = format_.shards().here(unit);
    const std::size_t part = in_use(layout_, unit, use, own.end) - in_use(layout_, unit, use, own.begin);
    return part * arrays_of_others_ * sizeof(float);
  }
  const std::size_t all = use_elements(layout_, unit, use);
  const std::size_t part = all / ranks + (rank < all % ranks ? 1 : 0);
  return (part * arrays_of_others_ + all - part) * sizeof(float);
}

}  // namespace sluice::engine
