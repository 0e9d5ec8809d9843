#include <algorithm>
#include <cmath>

#include "engine/engine_state.h"

namespace sluice::engine {

void Engine::State::build_schedule(const Profile& profile) {
  std::vector<std::vector<HoldingId>> holdings;
  for (std::size_t group = 0; group < groups; ++group)
    for (Access access : profile.schedule) {
      access.final = access.final && group + 1 == groups;
      holdings.push_back(holdings_of(access));
      accesses.push_back(access);
    }
  pager.set_schedule(std::move(holdings));
}

void Engine::State::acquire_in_order(const Access& access) {
  Access expected = in_step && position < accesses.size() ? accesses[position] : Access{};
  const bool final = std::exchange(expected.final, false);
  Access asked = access;
  asked.final = false;
  if (!in_step || position >= accesses.size() || asked != expected)
    refuse(ErrorCode::kState, "unit '{}' is acquired out of the schedule (access {} of {})",
           name_of(access.unit), position, accesses.size());
  pager.set_position(position);
  queue.ensure_updated(access.unit);  // a pending update owns the gradient too
  if (access.parameters) pager.acquire(parameters[access.unit], Pager::Use::kRead);
  for (int use = 0; use < gradients.uses(access.unit); ++use)
    if (use == access.gradient_use || final)
      pager.acquire(gradients.holding(access.unit, use), Pager::Use::kModify);
  held.push_back(accesses[position]);
  ++position;
  pager.prefetch(plan.prefetch);
  queue.advance();
}

void Engine::State::release_in_order(const Access& released) {
  if (released.parameters) pager.release(parameters[released.unit]);
  if (released.final) return finish_gradient(released.unit);
  if (released.gradient_use < 0) return;
  const HoldingId gradient = gradients.holding(released.unit, released.gradient_use);
  pager.written(gradient, gradients.bytes(released.unit, released.gradient_use));
  pager.release(gradient);
}

void Engine::State::finish_gradient(UnitId unit) {
  const auto not_finite = gradients.finish(resources.threads, unit);
  for (int use = 1; use < gradients.uses(unit); ++use) {
    pager.release(gradients.holding(unit, use));
    pager.discard(gradients.holding(unit, use));
  }
  if (not_finite && !bad_parameter) bad_parameter = not_finite;
  if (!plan.clip && bad_parameter)
    fail(ErrorCode::kNotFinite, "the gradient of '{}' is not finite", layout.spec(*bad_parameter).name);
  const UnitRange units = together(unit);
  if (!plan.clip && units.size() == 1) {
    enqueue(units);
    return pager.release(gradients.holding(unit, 0));
  }
  pager.written(gradients.holding(unit, 0), gradients.final_bytes(unit));
  pager.park(gradients.holding(unit, 0));  // the update streams it from its record where it left memory
  pager.release(gradients.holding(unit, 0));
  finished[unit] = true;
  if (!plan.clip && have_final_gradients(units)) enqueue(units);
}

// In the order of the schedule as many as there is room for, or the first one in part.
void Engine::State::set_lendable(std::span<std::byte> memory) {
  settle();
  const auto streamed = [&](const UnitPlan& unit) { return plan.clip && !unit.resident(Part::kGradient); };
  updates.set_lendable(memory, std::any_of(plan.units.begin(), plan.units.end(), streamed));
  needed_first.clear();
  std::size_t free = updates.lendable_slots();
  for (const Access& access : accesses) {
    const std::size_t chunks = states.format().shards().chunks(access.unit);
    if (states.resident(access.unit) || std::count(needed_first.begin(), needed_first.end(), access.unit) > 0)
      continue;
    if (free == 0 || (chunks > free && !needed_first.empty())) break;
    needed_first.insert(needed_first.begin(), access.unit);
    free -= std::min(free, chunks);
  }
}

void Engine::State::lend(std::size_t from) {
  if (!in_step) refuse(ErrorCode::kState, "memory is lent outside of a step");
  updates.lend(from);
  while (!unforeseen.empty() && queue.current(unforeseen.front()) && !updates.under_way(unforeseen.front())) {
    updates.foresee(unforeseen.front());
    unforeseen.erase(unforeseen.begin());
  }
}

StepResult Engine::State::finish_step_in_order() {
  if (!in_step || position != accesses.size() || !held.empty())
    refuse(ErrorCode::kState, "step() is called after {} of {} accesses, with {} units held", position,
           accesses.size(), held.size());
  in_step = false;
  position = 0;
  pager.set_position(0);
  StepResult result{gradients.norm() * std::abs(settings.gradient_factor), 1.0};
  if (!plan.clip) return result;
  if (bad_parameter || !representable(result.gradient_norm)) {
    for (UnitId unit = 0; unit < layout.units().size(); ++unit)
      if (gradients.uses(unit) > 0) pager.discard(gradients.holding(unit, 0));
    updates.forget_foreseen();
    --steps;
    refuse_not_finite(bad_parameter, result.gradient_norm);
  }
  result.clip_factor = clip_factor = clip_factor_of(result.gradient_norm);
  for (const Access& access : accesses)
    if (access.parameters && gradients.uses(access.unit) > 0 && queue.current(access.unit))
      enqueue(together(access.unit));
  queue.advance();
  return result;
}

}  // namespace sluice::engine
