#include <algorithm>

#include "engine/engine_state.h"

// When updates become due, and with what.
namespace sluice::engine {

void Engine::State::enqueue(UnitRange units) {
  // What units have together waits for them all, and is brought together pass by pass. An update that follows
  // its gradient at once has all that it needs here, and keeps it.
  const bool holds = !plan.clip && units.size() == 1;
  if (holds) queue.start_shared();
  const ParameterId first = layout.first_parameter(units.first);
  if (units.size() > 1)  // the spans are updated as one: they count as the first does
    std::fill(applied.begin() + first, applied.begin() + layout.end_parameter(units.end - 1), applied[first]);
  std::vector<UpdateQueue::Due> all(units.size());
  for (UnitId unit = units.first; unit < units.end; ++unit) {
    std::erase(unforeseen, unit);  // with this update the step is done with it
    UpdateQueue::Due& due = all[unit - units.first];
    if (holds) {
      pager.acquire(gradients.holding(unit, 0), Pager::Use::kRead);
      due.holds_gradient = true;
      // Many gradients must not drive out all that they are applied to.
      due.holds_parameters = any_order || pager.present(parameters[unit]);
      if (due.holds_parameters) pager.acquire(parameters[unit], Pager::Use::kRead);
    }
    for (const GroupSettings& group : settings.groups)
      due.groups.push_back({group.learning_rate, group.weight_decay, clip_factor * settings.gradient_factor,
                            steps, settings.clip_value, group.settings});
    for (ParameterId p = layout.first_parameter(unit); p < layout.end_parameter(unit); ++p) {
      const bool has_gradient = !any_order || gradients.has(p);
      due.parameters.push_back({has_gradient ? ++applied[p] : 0, gradients.factor(p)});
    }
  }
  queue.add(units, std::move(all));
  // The master holds the values: what is on disk need not be read only to be overwritten.
  for (UnitId unit = units.first; unit < units.end; ++unit)
    if (states.has_master(unit) && plan.clip && !any_order && !pager.resident(parameters[unit]))
      pager.forget(parameters[unit]);
}

bool Engine::State::have_final_gradients(UnitRange units) const {
  for (UnitId unit = units.first; unit < units.end; ++unit)
    if (any_order ? !gradients.any(unit) || is_held(unit, false) : !finished[unit]) return false;
  return true;
}

void Engine::State::require_all_or_none() const {
  for (UnitId unit = 0; unit < layout.units().size(); unit = layout.siblings(unit).end) {
    const UnitRange units = together(unit);
    for (UnitId other = units.first; other < units.end; ++other)
      if (gradients.any(other) != gradients.any(unit))
        refuse(
            ErrorCode::kState,
            "unit '{}' has {} gradient in this step, and unit '{}' has {}: both have a part of '{}', which "
            "{} updates as a whole; give each part a gradient, or none",
            name_of(unit), gradients.any(unit) ? "a" : "no", name_of(other),
            gradients.any(other) ? "one" : "none", layout.units()[unit].parameters.front().name,
            optimizer.name());
  }
}

}  // namespace sluice::engine
