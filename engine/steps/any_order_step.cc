#include <algorithm>

#include "engine/steps/any_order_engine.h"
#include "engine/steps/core.h"
#include "engine/steps/shared_gradients.h"

// The gradients of an AnyOrderEngine, and how their updates become due. Steps and holds are in
// any_order_engine.cc.
namespace sluice::engine {

void AnyOrderEngine::add_gradient(ParameterId parameter, ConstArray gradient) {
  core().guarded([&](Core& c) {
    const UnitId unit = layout().location(parameter).unit;
    const std::string& name = layout().spec(parameter).name;
    if (!layout().trainable(unit))
      refuse(ErrorCode::kInvalidArgument, "a gradient of '{}' is added, and its unit '{}' is frozen", name,
             c.name_of(unit));
    if (!is_held_for_gradients(unit))
      refuse(ErrorCode::kState, "a gradient of '{}' is added, and its unit '{}' is not held for gradients",
             name, c.name_of(unit));
    if (!shared_ && updated_[parameter])
      refuse(ErrorCode::kState,
             "a second gradient of '{}' is added in one step, and the first was applied when its unit was "
             "released; updates in backward cannot accumulate",
             name);
    require_no_capture("given a gradient", unit);
    if (shared_)
      shared_->add(parameter, gradient);
    else
      c.gradients.add(c.resources.threads, parameter, gradient);
    changed_[unit] = true;
  });
}

void AnyOrderEngine::require_micro_batches(const char* what) const {
  if (!in_step()) refuse(ErrorCode::kState, "{} outside of a step", what);
  if (!ends_micro_batches_)
    refuse(ErrorCode::kState, "{}, and the engine was made without a number of micro-batches; state it",
           what);
}

void AnyOrderEngine::end_gradients(UnitId unit) {
  core().guarded([&](Core&) {
    require_micro_batches("gradients end");
    if (shared_) shared_->end_gradients(unit);
  });
}

void AnyOrderEngine::end_micro_batch() {
  core().guarded([&](Core&) {
    require_micro_batches("a micro-batch ends");
    if (!shared_) return;
    if (core().ranks) require_no_capture("a micro-batch ends", {});
    if (shared_->in_backward()) require_none_held("a micro-batch ends");
    shared_->end_micro_batch();
  });
}

void AnyOrderEngine::set_micro_batch(std::size_t number) {
  core().guarded([&](Core& c) {
    require_micro_batches("a micro-batch is chosen");
    if (!c.plan.reproducible)
      refuse(ErrorCode::kState,
             "a micro-batch is chosen, and the plan is not reproducible: gradients are added as they come");
    shared_->set_micro_batch(number);
  });
}

void AnyOrderEngine::require_gradient(ParameterId parameter) const {
  if (!has_gradient(parameter))
    refuse(ErrorCode::kState, "'{}' has no gradient in this step", layout().spec(parameter).name);
}

// Until it is applied, a gradient is this rank's own, not the mean.
void AnyOrderEngine::refuse_own_gradient(const char* what) const {
  if (shared_ && !core().plan.clip)
    refuse(ErrorCode::kState,
           "a gradient is {}, and updates in backward apply the mean over the ranks as soon as it is known; "
           "update at the end of the step",
           what);
}

void AnyOrderEngine::use_gradients() {
  if (core().ranks) require_no_capture("gradients are used, which ranks sum then,", {});
  if (shared_) shared_->use();
}

void AnyOrderEngine::read_gradient(ParameterId parameter, Array out) {
  core().guarded([&](Core& c) {
    refuse_own_gradient("read");
    if (c.plan.sums_in_backward)
      refuse(
          ErrorCode::kState,
          "a gradient is read, and at stages 2 and 3 a rank keeps its own part alone of what was summed {}; "
          "ask for stage 1, or for none",
          c.plan.sums_each_backward ? "in each backward pass" : "on GPUs");
    use_gradients();
    require_gradient(parameter);
    if (shared_) shared_->make_whole(parameter);
    const UnitId unit = layout().location(parameter).unit;
    require_no_capture("asked for a gradient", unit);
    c.queue.ensure_updated(unit);  // a pending update owns the gradient
    c.pager.acquire(c.gradients.holding(unit, 0), Pager::Use::kRead);
    c.gradients.read(c.resources.threads, parameter, out);
    c.pager.release(c.gradients.holding(unit, 0));
  });
}

void AnyOrderEngine::multiply_gradient(ParameterId parameter, double factor) {
  core().guarded([&](Core& c) {
    refuse_own_gradient("multiplied");
    use_gradients();
    require_gradient(parameter);
    if (shared_) shared_->multiplied(parameter, factor);
    c.gradients.multiply(parameter, factor);
  });
}

double AnyOrderEngine::gradient_norm(ParameterId parameter) {
  return core().guarded([&](Core& c) {
    refuse_own_gradient("measured");
    use_gradients();
    require_gradient(parameter);
    require_no_capture("asked for a norm", layout().location(parameter).unit);
    return c.gradients.norm(parameter);
  });
}

void AnyOrderEngine::drop_gradient(ParameterId parameter) {
  core().guarded([&](Core& c) {
    if (shared_) shared_->end_sum_to_drop(layout().location(parameter).unit);
    if (has_gradient(parameter))
      require_no_capture("asked to drop a gradient", layout().location(parameter).unit);
    c.gradients.drop(parameter);
    if (shared_) shared_->dropped(parameter);
    discard_unless_needed(layout().location(parameter).unit);
  });
}

// A pending update discards the gradient when it is applied, and a holder when it is released.
void AnyOrderEngine::discard_unless_needed(UnitId unit) {
  Core& c = core();
  if (c.gradients.uses(unit) == 0 || c.gradients.any(unit) || !c.queue.current(unit)) return;
  for (const HoldingId gradient : c.gradients.holdings(unit, 0))
    if (!c.pager.held(gradient)) c.pager.discard(gradient);
}

void AnyOrderEngine::drop_all_gradients() {
  core().gradients.drop_all();
  if (shared_) shared_->dropped_all();
  for (UnitId unit = 0; unit < layout().units().size(); ++unit) discard_unless_needed(unit);
}

// ---- updates at once, where the plan does not clip ----

bool AnyOrderEngine::have_final_gradients(UnitRange units) const {
  for (UnitId unit = units.first; unit < units.end; ++unit)
    if (!core().gradients.any(unit) || is_held(unit) || (shared_ && !shared_->is_summed(unit))) return false;
  return true;
}

void AnyOrderEngine::follow_final_gradients(UnitId unit) {
  if (have_final_gradients(core().together(unit))) update_at_once(core().together(unit));
}

void AnyOrderEngine::update_at_once(UnitRange units) {
  Core& c = core();
  for (UnitId unit = units.first; unit < units.end; ++unit) {
    const auto bad = c.checks_on_gpu() ? c.gradients.not_finite_factor(unit) : c.gradients.not_finite(unit);
    if (bad) refuse_at_once(units, *bad);
  }
  for (UnitId unit = units.first; unit < units.end; ++unit)
    await_update(unit, units.size() > 1 && !has_parts());
  c.enqueue(units, true);
  for (UnitId unit = units.first; unit < units.end; ++unit) {
    for (ParameterId p = layout().first_parameter(unit); p < layout().end_parameter(unit); ++p)
      if (has_gradient(p)) updated_[p] = true;
    c.gradients.hand_over(unit);
  }
}

// The unit's values are out of date from now on, and must leave their address even during a write-back.
void AnyOrderEngine::await_update(UnitId unit, bool from_record) {
  if (from_record) core().pager.park(core().gradients.holding(unit, 0));
  core().pager.hide(core().parameters[unit]);
}

void AnyOrderEngine::refuse_at_once(UnitRange units, ParameterId bad) {
  for (UnitId unit = units.first; unit < units.end; ++unit) {
    core().gradients.drop_unit(unit);
    core().pager.discard(core().gradients.holding(unit, 0));
  }
  refuse(ErrorCode::kNotFinite,
         "the gradient of '{}' is not finite; its unit was not updated, and units whose backward came before "
         "were",
         layout().spec(bad).name);
}

// A GPU, or the CPU beside it, skips the update of a unit with a gradient that is not finite; the update of
// none of the unit's parameters then counts.
void AnyOrderEngine::learn_of_refused() {
  Core& c = core();
  if (!c.checks_on_gpu()) return;
  if (c.gradients.any_squares_on_gpu()) require_no_capture("it is asked which gradients are finite", {});
  while (const auto bad = c.gradients.not_finite_of_step()) {
    const UnitId unit = layout().location(*bad).unit;
    refused_.push_back(*bad);
    c.gradients.drop_unit(unit);
    for (ParameterId p = layout().first_parameter(unit); p < layout().end_parameter(unit); ++p)
      if (updated_[p]) --c.applied[p];
  }
}

void AnyOrderEngine::refuse_what_the_gpu_refused() {
  const std::vector<ParameterId> all = std::exchange(refused_, {});
  if (all.empty()) return;
  refuse(ErrorCode::kNotFinite,
         "the gradient of '{}' is not finite; its unit was not updated{}, and the other units were",
         layout().spec(all.front()).name,
         all.size() == 1 ? "" : fmt::format(" (nor {} more with such gradients)", all.size() - 1));
}

// ---- the step ----

void AnyOrderEngine::require_all_or_none() const {
  const Gradients& gradients = core().gradients;
  for (UnitId unit = 0; unit < layout().units().size(); unit = layout().siblings(unit).end) {
    const UnitRange units = core().together(unit);
    for (UnitId other = units.first; other < units.end; ++other)
      if (gradients.any(other) != gradients.any(unit))
        refuse(
            ErrorCode::kState,
            "unit '{}' has {} gradient in this step, and unit '{}' has {}: both have a part of '{}', which "
            "{} updates as a whole; give each part a gradient, or none",
            core().name_of(unit), gradients.any(unit) ? "a" : "no", core().name_of(other),
            gradients.any(other) ? "one" : "none", layout().units()[unit].parameters.front().name,
            core().optimizer.name());
  }
}

StepResult AnyOrderEngine::update_all(const std::vector<Access>& accesses, const StepSettings& settings) {
  Core& c = core();
  c.settings = settings;
  c.in_step = false;
  const Core::Measured measured = c.measure();
  if (!Core::usable(measured)) {
    --c.steps;
    if (!settings.keep_gradients) drop_all_gradients();
    c.refuse_not_finite(measured);
  }
  StepResult result = measured.result;
  c.clip(result);
  for (const UnitRange& units : units_to_update(accesses)) {
    for (UnitId unit = units.first; unit < units.end; ++unit) {
      // Completes an update of the previous step, if nobody has acquired the unit since.
      c.queue.ensure_updated(unit);
      await_update(unit, !has_parts());
    }
    c.enqueue(units, true);
  }
  if (!settings.keep_gradients) c.gradients.drop_all();
  if (!settings.keep_gradients && shared_) shared_->dropped_all();
  // Without a disk the updates wait for nothing, and afterwards the threads are free for the caller. Where
  // state is partitioned, another rank may need updates of this one while its client makes no calls.
  if (has_parts())
    c.queue.settle_for_others();
  else if (!c.gpu && !c.plan.uses_disk())
    c.queue.settle();
  else if (c.gpu)
    c.queue.start_all();
  else
    c.queue.advance();
  return result;
}

// Returns the units to update: first in the order of the step's accesses, which the next step is expected to
// have, too; then those with kept gradients that were not accessed. Where state is partitioned, in the order
// of declaration, the same on all ranks.
std::vector<UnitRange> AnyOrderEngine::units_to_update(const std::vector<Access>& accesses) const {
  std::vector<UnitRange> units;
  std::vector<bool> seen(layout().units().size());
  const auto add = [&](UnitId unit) {
    const UnitRange all = core().together(unit);
    if (!seen[unit] && core().gradients.any(unit)) units.push_back(all);
    std::fill(seen.begin() + all.first, seen.begin() + all.end, true);
  };
  if (!has_parts())
    for (const Access& access : accesses) add(access.unit);
  for (UnitId unit = 0; unit < layout().units().size(); ++unit) add(unit);
  return units;
}

}  // namespace sluice::engine
