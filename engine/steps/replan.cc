#include "engine/steps/replan.h"

#include "core/bytes.h"
#include "engine/steps/refusal.h"

namespace sluice::engine {

// ---- shutdown ----

void leave(Stores& s, bool with_values, const std::function<void(UnitId, allocator::FormerHome)>& take) {
  UnitId unit = 0;
  try {
    if (with_values) {
      s.settle();
      s.gradients.drop_all();
      s.states.drop();
      s.wholes.drop();
      s.pager.drop_unexposed();
    }
    for (; unit < s.parameters.size(); ++unit) take(unit, s.pager.leave(s.parameters[unit], with_values));
  } catch (...) {
    for (; unit < s.parameters.size(); ++unit) take(unit, s.pager.leave(s.parameters[unit], false));
    throw;
  }
}

// ---- change of plan ----

namespace {

void take_disk(Stores& s, const Plan& next) {
  std::vector<HoldingId> holdings;
  std::vector<UnitId> units, shards, parts;
  for (UnitId unit = 0; unit < s.layout.units().size(); ++unit) {
    const UnitPlan& placed = next.units[unit];
    if (s.pager.define_backing(s.parameters[unit], placed.tier(Part::kParameters)))
      holdings.push_back(s.parameters[unit]);
    for (int use = 0; use < s.gradients.uses(unit); ++use)
      for (const HoldingId gradient : s.gradients.holdings(unit, use))
        if (s.pager.define_backing(gradient, placed.tier(Part::kGradient))) holdings.push_back(gradient);
    if (s.states.define_backing(unit, placed.tier(Part::kState))) units.push_back(unit);
    if (s.parameter_shards && s.parameter_shards->define_backing(unit, placed, *s.backings))
      shards.push_back(unit);
    if (s.gradient_parts.define_record(unit, placed, *s.backings)) parts.push_back(unit);
  }
  if (holdings.empty() && units.empty() && shards.empty() && parts.empty()) return;
  try {
    s.backings->allocate();
  } catch (const Error& error) {
    for (const HoldingId holding : holdings) s.pager.forget_backing(holding);
    for (const UnitId unit : units) s.states.forget_backing(unit);
    for (const UnitId unit : shards) s.parameter_shards->forget_backing(unit);
    for (const UnitId unit : parts) s.gradient_parts.forget_record(unit);
    refuse(error.code(), "{}", error.what());
  }
}

void place(Stores& s, const Plan& next, bool resident) {
  for (UnitId unit = 0; unit < s.layout.units().size(); ++unit) {
    const UnitPlan& placed = next.units[unit];
    s.report_work();
    if (placed.resident(Part::kParameters) == resident)
      s.pager.set_tier(s.parameters[unit], placed.tier(Part::kParameters));
    if (placed.resident(Part::kGradient) != resident || !placed.gradient_stored) continue;
    for (int use = 0; use < s.gradients.uses(unit); ++use)
      for (const HoldingId gradient : s.gradients.holdings(unit, use))
        s.pager.set_tier(gradient, placed.tier(Part::kGradient));
  }
}

std::size_t staging_bytes(const Stores& s, const Plan& of) {
  return of.staging_slots * UpdatePipeline::slot_bytes(s.states.format(), s.layout, of.serving_pieces > 0);
}

}  // namespace

// Everything that leaves memory does so before anything enters. Shards of parameters pass through a slot.
// Other ranks' reads of this one wait meanwhile; reports of work tell them that it makes progress.
void replan(Stores& s, const Plan& next) {
  s.settle();
  take_disk(s, next);
  if (s.parameter_shards) s.parameter_shards->pause();
  const std::vector<allocator::Tier> tiers = Stores::state_tiers(next);
  const auto moved = [&s] { s.report_work(); };
  const bool more_staging = staging_bytes(s, next) > staging_bytes(s, s.plan);
  const auto set_slots = [&] {
    s.updates.set_streams_parameters(next.serving_pieces > 0);
    s.updates.set_slots(s.resources.ledger, next.staging_slots);
  };
  s.states.leave_memory(tiers, moved);
  if (s.parameter_shards) s.parameter_shards->leave_memory(next, s.resources.ledger, s.updates.slot(0));
  s.gradient_parts.leave_memory(next);
  if (!more_staging) set_slots();
  place(s, next, false);
  std::size_t frames = next.extents;  // resident parameters are in frames, too
  for (UnitId unit = 0; unit < s.layout.units().size(); ++unit)
    if (next.units[unit].resident(Part::kParameters) && !is_packed(s.layout.unit_bytes(unit)))
      frames += divide_up(s.layout.unit_bytes(unit), next.extent_bytes);
  s.pager.set_extents(frames);
  place(s, next, true);
  s.states.enter_memory(tiers, moved);
  s.gradient_parts.enter_memory(next);
  if (more_staging) set_slots();
  if (s.parameter_shards) s.parameter_shards->enter_memory(next, s.resources.ledger, s.updates.slot(0));
  s.plan = next;
  if (s.parameter_shards) s.parameter_shards->resume();
}

}  // namespace sluice::engine
