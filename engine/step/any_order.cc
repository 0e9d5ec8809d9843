#include <algorithm>
#include <cmath>
#include <set>

#include "engine/engine_state.h"

namespace sluice::engine {

void Engine::State::acquire_in_any_order(const Access& access) {
  const bool gradient = access.gradient_use == 0;
  require_values(access.unit);
  if (gradient && !in_step)
    refuse(ErrorCode::kState, "unit '{}' is acquired for gradients outside of a step", name_of(access.unit));
  if (gradient && !layout.trainable(access.unit))
    refuse(ErrorCode::kInvalidArgument,
           "unit '{}' is acquired for gradients, and it is frozen; acquire it for reading",
           name_of(access.unit));
  if (!is_held(access.unit, false)) check_held_units(access.unit);
  pager.set_position(recorder.follow(access, in_step));
  queue.ensure_updated(access.unit);
  if (access.parameters) {
    pager.acquire(parameters[access.unit], Pager::Use::kRead);
    pager.view(parameters[access.unit], false);
  }
  if (gradient) pager.acquire(gradients.holding(access.unit, 0), Pager::Use::kModify);
  held.push_back({access.unit, access.parameters, gradient ? 0 : -1, false});
  pager.prefetch(plan.prefetch);
  queue.advance();
}

bool Engine::State::is_held(UnitId unit, bool for_gradients) const {
  return std::any_of(held.begin(), held.end(), [&](const Access& h) {
    return h.unit == unit && (!for_gradients || h.gradient_use == 0);
  });
}

void Engine::State::check_held_units(UnitId wanted) const {
  std::set<UnitId> units;
  for (const Access& access : held) units.insert(access.unit);
  if (units.size() < held_units) return;
  std::string names;
  for (const UnitId unit : units) names += (names.empty() ? "'" : ", '") + name_of(unit) + "'";
  refuse(ErrorCode::kState,
         "unit '{}' is acquired while {} are held, and the plan was made for {} at once; release one, or "
         "state more",
         name_of(wanted), names, held_units);
}

void Engine::State::release_in_any_order(const Access& released) {
  const UnitId unit = released.unit;
  if (released.parameters) {
    pager.conceal(parameters[unit], false);
    pager.release(parameters[unit]);
  }
  if (released.gradient_use >= 0) {
    const HoldingId gradient = gradients.holding(unit, 0);
    const bool last = !is_held(unit, true);
    if (last && gradients.any(unit) && gradients.take_changed(unit))
      pager.written(gradient, gradients.bytes(unit, 0));
    pager.release(gradient);
    if (last && !gradients.any(unit)) pager.discard(gradient);
  }
  if (!plan.clip && gradients.uses(unit) > 0 && have_final_gradients(together(unit)))
    update_at_once(together(unit));
}

void Engine::State::update_at_once(UnitRange units) {
  for (UnitId unit = units.first; unit < units.end; ++unit)
    if (const auto bad = gradients.not_finite(unit)) refuse_at_once(units, *bad);
  for (UnitId unit = units.first; unit < units.end; ++unit) await_update(unit, units.size() > 1);
  enqueue(units);
  for (UnitId unit = units.first; unit < units.end; ++unit) {
    for (ParameterId p = layout.first_parameter(unit); p < layout.end_parameter(unit); ++p)
      if (gradients.has(p)) updated[p] = true;
    gradients.hand_over(unit);
  }
}

// Its values are out of date from now on; a write of before keeps them where they can be read.
void Engine::State::await_update(UnitId unit, bool from_record) {
  if (from_record) pager.park(gradients.holding(unit, 0));
  pager.hide(parameters[unit]);
}

void Engine::State::refuse_at_once(UnitRange units, ParameterId bad) {
  for (UnitId unit = units.first; unit < units.end; ++unit) {
    gradients.drop_unit(unit);
    pager.discard(gradients.holding(unit, 0));
  }
  refuse(ErrorCode::kNotFinite,
         "the gradient of '{}' is not finite; its unit was not updated, and those were whose backward came "
         "before",
         layout.spec(bad).name);
}

void Engine::State::acquire_for_editing(UnitId unit) {
  acquire_in_any_order({unit, true, -1, false});
  pager.acquire(parameters[unit], Pager::Use::kModify);  // nobody writes it to disk meanwhile
  pager.view(parameters[unit], true);
}

void Engine::State::release_from_editing(UnitId unit) {
  const Access access = take_held({unit, true, -1, false});
  const HoldingId values = parameters[unit];
  if (states.has_master(unit)) {
    settle();  // the masters go through the staging slots
    take_masters(streams(), unit, {pager.data(values), layout.dtype(unit)});
  }
  pager.conceal(values, true);
  release_in_any_order(access);
  pager.written(values, layout.unit_bytes(unit));
  pager.release(values);
  queue.advance();
}

void Engine::State::add_gradient(ParameterId parameter, ConstArray gradient) {
  const UnitId unit = layout.place(parameter).unit;
  if (!layout.trainable(unit))
    refuse(ErrorCode::kInvalidArgument, "a gradient of '{}' is added, and its unit '{}' is frozen",
           layout.spec(parameter).name, name_of(unit));
  if (!is_held(unit, true))
    refuse(ErrorCode::kState, "a gradient of '{}' is added, and its unit '{}' is not held for gradients",
           layout.spec(parameter).name, name_of(unit));
  if (updated[parameter])
    refuse(ErrorCode::kState,
           "a second gradient of '{}' is added in one step, and the first was applied when its unit was "
           "released; "
           "updates in backward cannot accumulate",
           layout.spec(parameter).name);
  gradients.add(resources.threads, parameter, gradient);
}

void Engine::State::require_gradient(ParameterId parameter) const {
  if (!any_order || !gradients.has(parameter))
    refuse(ErrorCode::kState, "'{}' has no gradient in this step", layout.spec(parameter).name);
}

void Engine::State::read_gradient(ParameterId parameter, Array out) {
  require_gradient(parameter);
  const UnitId unit = layout.place(parameter).unit;
  queue.ensure_updated(unit);  // until then it is the update's
  pager.acquire(gradients.holding(unit, 0), Pager::Use::kRead);
  gradients.read(resources.threads, parameter, out);
  pager.release(gradients.holding(unit, 0));
}

void Engine::State::drop_gradient(ParameterId parameter) {
  const UnitId unit = layout.place(parameter).unit;
  gradients.drop(parameter);
  discard_unless_needed(unit);
}

// A pending update discards it when it is applied, and a holder when it is released.
void Engine::State::discard_unless_needed(UnitId unit) {
  if (gradients.uses(unit) == 0 || gradients.any(unit) || !queue.current(unit)) return;
  const HoldingId gradient = gradients.holding(unit, 0);
  if (!pager.held(gradient)) pager.discard(gradient);
}

double Engine::State::gradient_norm(ParameterId parameter) const {
  require_gradient(parameter);
  return gradients.norm(parameter);
}

void Engine::State::abandon_step() {
  if (!any_order || !in_step)
    refuse(ErrorCode::kState, "abandon_step() is called {}",
           any_order ? "without begin_step()" : "in a schedule");
  gradients.drop_all();
  while (!held.empty()) release_in_any_order(take_held(held.back()));
  for (UnitId unit = 0; unit < layout.units().size(); ++unit) discard_unless_needed(unit);
  recorder.begin_step();
  in_step = false;
  --steps;
}

// In the order of the step's accesses, which is that of the next one's; then what has kept a gradient without
// any.
std::vector<UnitRange> Engine::State::units_to_update() const {
  std::vector<UnitRange> units;
  std::vector<bool> seen(layout.units().size());
  const auto add = [&](UnitId unit) {
    const UnitRange all = together(unit);
    if (!seen[unit] && gradients.any(unit)) units.push_back(all);
    std::fill(seen.begin() + all.first, seen.begin() + all.end, true);
  };
  for (const Access& access : accesses) add(access.unit);
  for (UnitId unit = 0; unit < layout.units().size(); ++unit) add(unit);
  return units;
}

void Engine::State::end_step_without_update(bool keep_gradients) {
  in_step = false;
  --steps;
  if (keep_gradients) return;
  gradients.drop_all();
  for (UnitId unit = 0; unit < layout.units().size(); ++unit) discard_unless_needed(unit);
}

StepResult Engine::State::finish_step_at_once() {
  in_step = false;
  queue.advance();
  return {gradients.norm() * std::abs(settings.gradient_factor), 1.0};
}

StepResult Engine::State::finish_step_in_any_order(const StepSettings& given) {
  if (plan.clip) check_settings(given);
  if (!in_step || !held.empty())
    refuse(ErrorCode::kState, "step() is called {}",
           in_step ? fmt::format("while unit '{}' is held", name_of(held.front().unit))
                   : "without begin_step()");
  require_all_or_none();
  if (plan.clip) settings = given;
  accesses = recorder.end_step();
  std::vector<std::vector<HoldingId>> holdings;
  for (const Access& access : accesses) holdings.push_back(holdings_of(access));
  pager.set_schedule(std::move(holdings));
  pager.set_position(0);
  if (!plan.clip) return finish_step_at_once();
  const std::vector<UnitRange> to_update = units_to_update();
  StepResult result{gradients.norm() * std::abs(settings.gradient_factor), 1.0};
  if (const auto bad = gradients.not_finite(); bad || !representable(result.gradient_norm)) {
    end_step_without_update(given.keep_gradients);
    refuse_not_finite(bad, result.gradient_norm);
  }
  result.clip_factor = clip_factor = clip_factor_of(result.gradient_norm);
  for (const UnitRange& units : to_update) {
    for (UnitId unit = units.first; unit < units.end; ++unit) {
      queue.ensure_updated(unit);  // of the step before, where nobody acquired it since
      await_update(unit, true);
    }
    enqueue(units);
  }
  if (!given.keep_gradients) gradients.drop_all();
  in_step = false;
  if (plan.uses_disk())
    queue.advance();
  else
    queue.settle();  // there is nothing to wait for, and the caller's own threads rest
  return result;
}

}  // namespace sluice::engine
