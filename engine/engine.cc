#include "engine/engine.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "core/bytes.h"
#include "engine/engine_state.h"

namespace sluice::engine {
std::vector<allocator::Tier> Engine::State::state_tiers(const Plan& plan) {
  std::vector<allocator::Tier> tiers;
  for (const UnitPlan& unit : plan.units) tiers.push_back(unit.tier(Part::kState));
  return tiers;
}

Engine::State::State(const Profile& profile, const Plan& the_plan, const optim::Optimizer& the_optimizer,
                     const Resources& the_resources)
    : resources(the_resources),
      optimizer(the_optimizer),
      plan(the_plan),
      layout(profile.units),
      groups(divide_up(profile.micro_batches, plan.group)),
      waits(resources.trace),
      backings(make_backings(resources.disk)),
      pager(resources.ledger, *backings, waits),
      gradients(layout, gradient_uses(profile), plan, profile.any_order, pager),
      states(layout, StateFormat(layout, optimizer, plan.chunk_elements), state_tiers(plan), *backings),
      wholes(layout, optimizer),
      executor(make_turn_executor(layout, optimizer, states.format(), wholes,
                                  {resources.threads, resources.products, resources.trace})),
      updates(layout, optimizer, states, *executor),
      queue(layout, optimizer, pager, gradients, updates, waits, parameters),
      any_order(profile.any_order),
      held_units(profile.held_units),
      applied(layout.parameters()),
      updated(layout.parameters()),
      has_values(layout.units().size()),
      finished(layout.units().size()) {
  for (UnitId unit = 0; unit < layout.units().size(); ++unit)
    parameters.push_back(pager.define(
        {"parameters of " + name_of(unit), layout.unit_bytes(unit), allocator::Purpose::kParameter,
         plan.units[unit].tier(Part::kParameters), any_order, true, is_packed(layout.unit_bytes(unit)),
         layout.units()[unit].parameters.front().continues()}));
  for (UnitId unit = 0; unit < layout.units().size(); ++unit)
    for (int use = 0; use < gradients.uses(unit); ++use)
      pager.follow(gradients.holding(unit, use), parameters[unit]);  // its update's
  build_schedule(profile);
  if (plan.uses_disk()) backings->allocate();
  pager.start(plan.extent_bytes, plan.extents);
  for (UnitId unit = 0; unit < parameters.size(); ++unit)
    by_address.push_back({pager.address(parameters[unit]), unit});
  std::ranges::sort(by_address, {}, &Addressed::begin);
  states.start(resources.ledger);
  wholes.start(resources.ledger);
  executor->start(resources.ledger);
  updates.set_slots(resources.ledger, plan.staging_slots);
  pager.on_stall([this] { return queue.finish_some(); });
}

std::vector<HoldingId> Engine::State::holdings_of(const Access& access) const {
  std::vector<HoldingId> result;
  if (access.parameters) result.push_back(parameters[access.unit]);
  for (int use = 0; use < gradients.uses(access.unit); ++use)
    if (use == access.gradient_use || access.final) result.push_back(gradients.holding(access.unit, use));
  return result;
}

void Engine::State::settle() {
  queue.settle();
  pager.wait_all();
}

void Engine::State::check_settings(const StepSettings& given) const {
  // The loops have them in f32.
  const auto finite = [](double value) { return std::isfinite(static_cast<float>(value)); };
  const auto usable = [&](double value) { return finite(value) && value >= 0; };
  for (const GroupSettings& group : given.groups) {
    if (!usable(group.learning_rate) || !usable(group.weight_decay))
      refuse(
          ErrorCode::kInvalidArgument,
          "a learning rate of {} and a weight decay of {} are given; both must be 0 or more, and finite in "
          "32 bits",
          group.learning_rate, group.weight_decay);
    if (group.settings != nullptr && group.settings->optimizer() != optimizer.name())
      refuse(ErrorCode::kInvalidArgument, "settings of {} are given, and the optimizer is {}",
             group.settings->optimizer(), optimizer.name());
  }
  const auto is_clip = [&](double value) {
    return usable(value) && (value == 0 || static_cast<float>(value) > 0);
  };
  if (!is_clip(given.clip) || !is_clip(given.clip_value) || !finite(given.gradient_factor))
    refuse(ErrorCode::kInvalidArgument,
           "a clip of {}, a clip by value of {} and a gradient factor of {} are given; all must be finite in "
           "32 bits, and the clips 0, or above 0 in 32 bits",
           given.clip, given.clip_value, given.gradient_factor);
  std::uint32_t needed = 0;
  for (ParameterId p = 0; p < layout.parameters(); ++p) needed = std::max(needed, layout.spec(p).group + 1);
  if (given.groups.size() < needed)
    refuse(ErrorCode::kInvalidArgument, "settings of {} parameter groups are given, and the model has {}",
           given.groups.size(), needed);
}

bool Engine::State::representable(double norm) {
  return norm <= static_cast<double>(std::numeric_limits<float>::max());
}

double Engine::State::clip_factor_of(double norm) const {
  // torch.nn.utils.clip_grad_norm_ has the same 1e-6.
  return settings.clip > 0 ? std::min(1.0, settings.clip / (norm + 1e-6)) : 1.0;
}

void Engine::State::refuse_not_finite(std::optional<ParameterId> parameter, double norm) const {
  if (parameter)
    refuse(ErrorCode::kNotFinite, "the gradient of '{}' is not finite; no parameter was changed",
           layout.spec(*parameter).name);
  refuse(ErrorCode::kNotFinite,
         "the norm of the gradients is {} with a gradient factor of {}; no parameter was changed", norm,
         settings.gradient_factor);
}

// In any order, values may be read and written between the accesses of a step.
void Engine::State::require_reachable(UnitId unit, const char* verb) const {
  if (in_step && !any_order)
    refuse(ErrorCode::kState, "unit '{}' is {} in the middle of a step", name_of(unit), verb);
}

void Engine::State::require_values(UnitId unit) const {
  if (!has_values[unit])
    refuse(ErrorCode::kState,
           "unit '{}' has no values yet, or was given them by a source that failed; load it first",
           name_of(unit));
}

Access Engine::State::take_held(const Access& access) {
  const auto found = std::find_if(held.begin(), held.end(), [&](const Access& h) {
    return h.unit == access.unit && h.parameters == access.parameters &&
           h.gradient_use == access.gradient_use;
  });
  if (found == held.end())
    refuse(ErrorCode::kState, "unit '{}' is released and was not acquired", name_of(access.unit));
  const Access taken = *found;
  held.erase(found);
  return taken;
}

Engine::Engine(const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer,
               const Resources& resources)
    : state_(std::make_unique<State>(profile, plan, optimizer, resources)) {}
Engine::~Engine() = default;

const Layout& Engine::layout() const { return state_->layout; }
std::uint64_t Engine::steps() const { return state_->steps; }
std::uint64_t Engine::steps(ParameterId parameter) const { return state_->applied[parameter]; }
void Engine::set_steps(std::uint64_t steps) {
  state_->guarded([&] {
    state_->steps = steps;
    for (ParameterId p = 0; p < state_->applied.size(); ++p)
      state_->applied[p] = state_->layout.trainable(state_->layout.place(p).unit) ? steps : 0;
  });
}
void Engine::set_steps(ParameterId parameter, std::uint64_t steps) {
  state_->guarded([&] { state_->applied[parameter] = steps; });
}

void Engine::load(UnitId unit, const UnitSource& source) {
  State& s = *state_;
  std::exception_ptr source_failure;  // the engine itself is whole then
  s.guarded([&] {
    s.require_reachable(unit, "loaded");
    if (s.is_held(unit, false))
      refuse(ErrorCode::kState, "unit '{}' is loaded while it is held; release it", s.name_of(unit));
    if (!source.values) s.require_values(unit);
    s.settle();
    s.has_values[unit] = false;
    std::byte* values = s.pager.acquire(s.parameters[unit], Pager::Use::kModify);
    source_failure = load_values(s.streams(), unit, {values, s.layout.dtype(unit)}, source);
    try {
      if (source_failure == nullptr) s.wholes.load(unit, source.whole);
    } catch (...) {
      source_failure = std::current_exception();
    }
    s.pager.written(s.parameters[unit], s.layout.unit_bytes(unit));
    s.pager.release(s.parameters[unit]);
    s.has_values[unit] = source_failure == nullptr;
    if (!source.state)  // a state of zeros is that of a parameter that was never updated
      std::fill(s.applied.begin() + s.layout.first_parameter(unit),
                s.applied.begin() + s.layout.end_parameter(unit), 0);
  });
  if (source_failure) std::rethrow_exception(source_failure);
}

void Engine::save(UnitId unit, const UnitSink& sink) {
  State& s = *state_;
  std::exception_ptr sink_failure;  // the engine itself is whole then
  s.guarded([&] {
    s.require_reachable(unit, "saved");
    s.require_values(unit);
    s.settle();
    std::byte* values = s.pager.acquire(s.parameters[unit], Pager::Use::kRead);
    if (unit + 1 < s.parameters.size()) s.pager.prefetch_one(s.parameters[unit + 1]);
    sink_failure = save_values(s.streams(), unit, {values, s.layout.dtype(unit)}, sink);
    try {
      if (sink_failure == nullptr) s.wholes.save(unit, sink.whole);
    } catch (...) {
      sink_failure = std::current_exception();
    }
    s.pager.release(s.parameters[unit]);
  });
  if (sink_failure) std::rethrow_exception(sink_failure);
}

bool Engine::in_step() const { return state_->in_step; }

void Engine::begin_step(const StepSettings& settings) {
  State& s = *state_;
  s.guarded([&] {
    if (s.in_step) refuse(ErrorCode::kState, "begin_step() is called twice without step()");
    if (settings.clip > 0 && !s.plan.clip)
      refuse(ErrorCode::kInvalidArgument,
             "clipping by norm {} is asked for, and the plan was made without clipping", settings.clip);
    if (settings.keep_gradients && !s.plan.clip)
      refuse(ErrorCode::kInvalidArgument,
             "gradients are to be kept over the step, and they are applied in backward and given up");
    if (s.any_order) s.recorder.begin_step();
    if (!s.any_order || !s.plan.clip) s.check_settings(settings);
    s.settings = settings;
    s.clip_factor = 1;
    s.bad_parameter.reset();
    s.unforeseen = s.needed_first;
    s.gradients.begin_step();
    std::fill(s.updated.begin(), s.updated.end(), false);
    std::fill(s.finished.begin(), s.finished.end(), false);
    ++s.steps;
    s.in_step = true;
  });
}

void Engine::acquire(const Access& access) {
  State& s = *state_;
  s.guarded([&] { s.any_order ? s.acquire_in_any_order(access) : s.acquire_in_order(access); });
}

void Engine::release(const Access& access) {
  State& s = *state_;
  s.guarded([&] {
    const Access released = s.take_held(access);
    s.any_order ? s.release_in_any_order(released) : s.release_in_order(released);
    s.queue.advance();
  });
}

void Engine::acquire_for_editing(UnitId unit) {
  state_->guarded([&] { state_->acquire_for_editing(unit); });
}

void Engine::release_from_editing(UnitId unit) {
  state_->guarded([&] { state_->release_from_editing(unit); });
}

ConstArray Engine::parameter(ParameterId parameter) const {
  State& s = *state_;
  return s.guarded([&] {
    const Layout::Place& place = s.layout.place(parameter);
    return ConstArray{s.pager.address(s.parameters[place.unit]), s.layout.dtype(place.unit)}.at(place.offset);
  });
}

GradientTarget Engine::gradient(ParameterId parameter, int use, std::size_t micro_batch) {
  State& s = *state_;
  return s.guarded([&] {
    const UnitId unit = s.layout.place(parameter).unit;
    const bool acquired = std::any_of(s.held.begin(), s.held.end(), [&](const Access& a) {
      return a.unit == unit && a.gradient_use == use;
    });
    if (!acquired || use < 0 || use >= s.layout.spec(parameter).uses)
      refuse(ErrorCode::kState, "the gradient of '{}' is written without its unit",
             s.layout.spec(parameter).name);
    GradientTarget target;
    target.data = s.gradients.target(parameter, use, micro_batch, &target.accumulate);
    return target;
  });
}

void Engine::add_gradient(ParameterId parameter, ConstArray gradient) {
  state_->guarded([&] { state_->add_gradient(parameter, gradient); });
}

void Engine::read_gradient(ParameterId parameter, Array out) {
  state_->guarded([&] { state_->read_gradient(parameter, out); });
}
void Engine::multiply_gradient(ParameterId parameter, double factor) {
  state_->guarded([&] {
    state_->require_gradient(parameter);
    state_->gradients.multiply(parameter, factor);
  });
}
void Engine::drop_gradient(ParameterId parameter) {
  state_->guarded([&] { state_->drop_gradient(parameter); });
}
double Engine::gradient_norm(ParameterId parameter) {
  return state_->guarded([&] { return state_->gradient_norm(parameter); });
}
void Engine::abandon_step() {
  state_->guarded([&] { state_->abandon_step(); });
}

StepResult Engine::step() {
  return state_->guarded([&] { return state_->finish_step_in_order(); });
}

StepResult Engine::step(const StepSettings& settings) {
  return state_->guarded([&] { return state_->finish_step_in_any_order(settings); });
}

void Engine::acquire_for_reading(UnitId unit) {
  State& s = *state_;
  s.guarded([&] {
    if (s.in_step)
      refuse(ErrorCode::kState, "unit '{}' is read in the middle of a step", s.layout.units()[unit].name);
    s.queue.ensure_updated(unit);
    s.pager.acquire(s.parameters[unit], Pager::Use::kRead);
    if (unit + 1 < s.parameters.size() && s.queue.current(unit + 1))
      s.pager.prefetch_one(s.parameters[unit + 1]);
    s.queue.advance();
  });
}

void Engine::release_from_reading(UnitId unit) {
  state_->guarded([&] { state_->pager.release(state_->parameters[unit]); });
}

std::optional<UnitId> Engine::unit_at(const std::byte* address) const {
  const State& s = *state_;
  const auto next = std::ranges::upper_bound(s.by_address, address, {}, &State::Addressed::begin);
  if (next == s.by_address.begin()) return std::nullopt;
  const auto [begin, unit] = *std::prev(next);
  return address < begin + s.layout.unit_bytes(unit) ? std::optional(unit) : std::nullopt;
}

void Engine::serve_touches(allocator::TouchServer& server) const { state_->pager.serve_touches(server); }

void Engine::State::leave(bool with_values, const std::function<void(UnitId, allocator::FormerHome)>& take) {
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

void Engine::leave(bool with_values, const std::function<void(UnitId, allocator::FormerHome)>& take) {
  State& s = *state_;
  if (!with_values) return s.leave(false, take);
  s.guarded([&] {
    if (!s.held.empty())
      refuse(ErrorCode::kState, "unit '{}' is held while the engine is left; release it",
             s.name_of(s.held.front().unit));
    for (UnitId unit = 0; unit < s.parameters.size(); ++unit) s.require_values(unit);
    s.leave(true, take);
  });
}

std::int64_t Engine::growth_of_leaving() const {
  const Pager::Leaving leaving = state_->pager.leaving();
  return static_cast<std::int64_t>(leaving.growth) - static_cast<std::int64_t>(leaving.given_back) -
         static_cast<std::int64_t>(state_->states.resident_bytes() + state_->wholes.resident_bytes());
}

void Engine::progress() {
  state_->guarded([&] { state_->queue.advance(); });
}
void Engine::settle() {
  state_->guarded([&] { state_->settle(); });
}

void Engine::set_lendable(std::span<std::byte> memory) {
  state_->guarded([&] { state_->set_lendable(memory); });
}
void Engine::lend(std::size_t from) {
  state_->guarded([&] { state_->lend(from); });
}
void Engine::take_back(std::size_t until) {
  state_->guarded([&] { state_->queue.take_back(until); });
}
void Engine::end_lending() noexcept {
  try {
    take_back(SIZE_MAX);
  } catch (...) {  // NOLINT: whoever calls the engine next is told
  }
  state_->updates.wait_for_lent();
}

Engine::Counters Engine::counters() const {
  return {state_->waits.read_seconds(), state_->waits.write_seconds(), state_->executor->seconds()};
}

}  // namespace sluice::engine
