#include "core/bytes.h"
#include "engine/steps/core.h"

namespace sluice::engine {

// ---- the end ----

void Core::leave(bool with_values, const std::function<void(UnitId, allocator::FormerHome)>& take) {
  UnitId unit = 0;
  try {
    if (with_values) {
      settle();
      gradients.drop_all();
      states.drop();
      wholes.drop();
      pager.drop_unexposed();
    }
    for (; unit < parameters.size(); ++unit) take(unit, pager.leave(parameters[unit], with_values));
  } catch (...) {
    for (; unit < parameters.size(); ++unit) take(unit, pager.leave(parameters[unit], false));
    throw;
  }
}

// ---- another plan ----

void Core::take_disk(const Plan& next) {
  std::vector<HoldingId> holdings;
  std::vector<UnitId> units, shards;
  for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
    const UnitPlan& placed = next.units[unit];
    if (pager.define_backing(parameters[unit], placed.tier(Part::kParameters)))
      holdings.push_back(parameters[unit]);
    for (int use = 0; use < gradients.uses(unit); ++use)
      for (const HoldingId gradient : gradients.holdings(unit, use))
        if (pager.define_backing(gradient, placed.tier(Part::kGradient))) holdings.push_back(gradient);
    if (states.define_backing(unit, placed.tier(Part::kState))) units.push_back(unit);
    if (parameter_shards && parameter_shards->define_backing(unit, placed, *backings)) shards.push_back(unit);
  }
  if (holdings.empty() && units.empty() && shards.empty()) return;
  try {
    backings->allocate();
  } catch (const Error& error) {
    for (const HoldingId holding : holdings) pager.forget_backing(holding);
    for (const UnitId unit : units) states.forget_backing(unit);
    for (const UnitId unit : shards) parameter_shards->forget_backing(unit);
    refuse(error.code(), "{}", error.what());
  }
}

void Core::place(const Plan& next, bool resident) {
  for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
    const UnitPlan& placed = next.units[unit];
    report_work();
    if (placed.resident(Part::kParameters) == resident)
      pager.set_tier(parameters[unit], placed.tier(Part::kParameters));
    if (placed.resident(Part::kGradient) != resident || !placed.gradient_stored) continue;
    for (int use = 0; use < gradients.uses(unit); ++use)
      for (const HoldingId gradient : gradients.holdings(unit, use))
        pager.set_tier(gradient, placed.tier(Part::kGradient));
  }
}

std::size_t Core::staging_bytes(const Plan& of) const {
  return of.staging_slots * UpdatePipeline::slot_bytes(states.format(), layout, of.serving_pieces > 0);
}

// Everything that leaves memory leaves it before anything enters. Shards of parameters go through a slot.
// Other ranks wait meanwhile for what they read of this one, and know by reports that it works.
void Core::replan(const Plan& next) {
  settle();
  take_disk(next);
  if (parameter_shards) parameter_shards->pause();
  const std::vector<allocator::Tier> tiers = state_tiers(next);
  const auto moved = [this] { report_work(); };
  const bool more_staging = staging_bytes(next) > staging_bytes(plan);
  const auto set_slots = [&] {
    updates.set_streams_parameters(next.serving_pieces > 0);
    updates.set_slots(resources.ledger, next.staging_slots);
  };
  states.leave_memory(tiers, moved);
  if (parameter_shards) parameter_shards->leave_memory(next, resources.ledger, updates.slot(0));
  if (!more_staging) set_slots();
  place(next, false);
  std::size_t frames = next.extents;  // resident parameters are in frames, too
  for (UnitId unit = 0; unit < layout.units().size(); ++unit)
    if (next.units[unit].resident(Part::kParameters) && !is_packed(layout.unit_bytes(unit)))
      frames += divide_up(layout.unit_bytes(unit), next.extent_bytes);
  pager.set_extents(frames);
  place(next, true);
  states.enter_memory(tiers, moved);
  if (more_staging) set_slots();
  if (parameter_shards) parameter_shards->enter_memory(next, resources.ledger, updates.slot(0));
  plan = next;
  if (parameter_shards) parameter_shards->resume();
}

}  // namespace sluice::engine
