#include "engine/engine.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/refusal.h"
#include "engine/step/gradients.h"
#include "engine/step/recorder.h"
#include "engine/step/update_pipeline.h"
#include "engine/step/update_queue.h"
#include "engine/store/pager.h"
#include "engine/store/state_store.h"
#include "engine/store/unit_values.h"

namespace sluice::engine {
namespace {

std::vector<bool> resident_states(const Plan& plan) {
  std::vector<bool> resident;
  for (const UnitPlan& unit : plan.units) resident.push_back(unit.state_resident);
  return resident;
}

}  // namespace

struct Engine::State {
  State(const Profile& profile, const Plan& the_plan, const optim::Optimizer& the_optimizer,
        const Resources& the_resources)
      : resources(the_resources),
        optimizer(the_optimizer),
        plan(the_plan),
        layout(profile.units),
        has_master(plan.dtype != Dtype::kF32),
        groups(divide_up(profile.micro_batches, plan.group)),
        pager(resources.ledger, resources.disk),
        gradients(layout, gradient_uses(profile), plan, pager),
        states(layout, optimizer.state().size() + (has_master ? 1 : 0), plan.chunk_elements,
               resident_states(plan), resources.disk),
        updates(layout, optimizer, states, has_master, resources.threads, resources.disk, resources.trace),
        queue(plan, pager, gradients, updates, parameters),
        any_order(profile.any_order),
        held_units(profile.held_units),
        applied(layout.parameters()) {
    for (UnitId unit = 0; unit < layout.units().size(); ++unit)
      parameters.push_back(
          pager.define({"parameters of " + layout.units()[unit].name, parameter_bytes(unit),
                        allocator::Purpose::kParameter, plan.units[unit].parameters_resident}));
    ensure(!any_order || plan.clip, "in any order, updates begin at step()");
    build_schedule(profile);
    if (resources.disk != nullptr && plan.uses_disk()) resources.disk->allocate();
    pager.start(plan.extent_bytes, plan.extents);
    states.start(resources.ledger);
    updates.start(resources.ledger, plan.staging_slots);
    pager.on_stall([this] { return queue.finish_some(); });
  }

  std::size_t parameter_bytes(UnitId unit) const { return layout.unit_elements(unit) * size_of(plan.dtype); }

  void build_schedule(const Profile& profile) {
    std::vector<std::vector<HoldingId>> holdings;
    for (std::size_t group = 0; group < groups; ++group)
      for (Access access : profile.schedule) {
        access.final = access.final && group + 1 == groups;
        holdings.push_back(holdings_of(access));
        accesses.push_back(access);
      }
    pager.set_schedule(std::move(holdings));
  }

  std::vector<HoldingId> holdings_of(const Access& access) const {
    std::vector<HoldingId> result;
    if (access.parameters) result.push_back(parameters[access.unit]);
    for (int use = 0; use < gradients.uses(access.unit); ++use)
      if (use == access.gradient_use || access.final) result.push_back(gradients.holding(access.unit, use));
    return result;
  }

  // --- updates ---

  // An update becomes due, with a copy of the settings.
  void enqueue(UnitId unit) {
    UpdateQueue::Due due;
    for (const GroupSettings& group : settings.groups)
      due.groups.push_back(
          {group.learning_rate, group.weight_decay, clip_factor * settings.gradient_factor, steps});
    for (ParameterId p = layout.first_parameter(unit); p < layout.end_parameter(unit); ++p)
      due.steps.push_back(!any_order || gradients.has(p) ? ++applied[p] : 0);
    queue.add(unit, std::move(due));
    // The master holds the values: what is on disk need not be read only to be overwritten.
    if (has_master && plan.clip && !any_order && !pager.resident(parameters[unit]))
      pager.forget(parameters[unit]);
  }

  void settle() {
    queue.settle();
    pager.wait_all();
  }

  // --- a step ---

  void acquire(const Access& access) {
    if (any_order) return acquire_in_any_order(access);
    Access expected = in_step && position < accesses.size() ? accesses[position] : Access{};
    const bool final = std::exchange(expected.final, false);
    Access asked = access;
    asked.final = false;
    if (!in_step || position >= accesses.size() || asked != expected)
      refuse(ErrorCode::kState, "unit '{}' is acquired out of the schedule (access {} of {})",
             layout.units()[access.unit].name, position, accesses.size());
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

  void acquire_in_any_order(const Access& access) {
    const bool gradient = access.gradient_use == 0;
    if (gradient && !in_step)
      refuse(ErrorCode::kState, "unit '{}' is acquired for gradients outside of a step",
             layout.units()[access.unit].name);
    if (!is_held(access.unit, false)) check_held_units(access.unit);
    pager.set_position(recorder.follow(access, in_step));
    queue.ensure_updated(access.unit);
    pager.acquire(parameters[access.unit], Pager::Use::kRead);
    if (gradient) pager.acquire(gradients.holding(access.unit, 0), Pager::Use::kModify);
    held.push_back({access.unit, true, gradient ? 0 : -1, false});
    pager.prefetch(plan.prefetch);
    queue.advance();
  }

  bool is_held(UnitId unit, bool for_gradients) const {
    return std::any_of(held.begin(), held.end(), [&](const Access& h) {
      return h.unit == unit && (!for_gradients || h.gradient_use == 0);
    });
  }

  void check_held_units(UnitId wanted) const {
    std::set<UnitId> units;
    for (const Access& access : held) units.insert(access.unit);
    if (units.size() < held_units) return;
    std::string names;
    for (const UnitId unit : units) names += (names.empty() ? "'" : ", '") + layout.units()[unit].name + "'";
    refuse(ErrorCode::kState,
           "unit '{}' is acquired while {} are held, and the plan was made for {} at once; release one, or "
           "state more",
           layout.units()[wanted].name, names, held_units);
  }

  void release(const Access& access) {
    const auto found = std::find_if(held.begin(), held.end(), [&](const Access& h) {
      return h.unit == access.unit && h.parameters == access.parameters &&
             h.gradient_use == access.gradient_use;
    });
    if (found == held.end())
      refuse(ErrorCode::kState, "unit '{}' is released and was not acquired",
             layout.units()[access.unit].name);
    const Access released = *found;
    held.erase(found);
    if (released.parameters) pager.release(parameters[released.unit]);
    if (released.final)
      finish_gradient(released.unit);
    else if (released.gradient_use >= 0 && any_order && is_held(released.unit, true))
      pager.release(gradients.holding(released.unit, 0));  // somebody else still adds to it
    else if (released.gradient_use >= 0)
      keep_gradient(released.unit, released.gradient_use);
    queue.advance();
  }

  void keep_gradient(UnitId unit, int use) {
    pager.written(gradients.holding(unit, use), gradients.bytes(unit, use));
    pager.release(gradients.holding(unit, use));
  }

  void finish_gradient(UnitId unit) {
    const auto not_finite = gradients.finish(resources.threads, unit);
    for (int use = 1; use < gradients.uses(unit); ++use) {
      pager.release(gradients.holding(unit, use));
      pager.discard(gradients.holding(unit, use));
    }
    if (not_finite && !bad_parameter) bad_parameter = not_finite;
    if (!plan.clip) {
      if (bad_parameter) fail_not_finite();
      return enqueue(unit);
    }
    pager.written(gradients.holding(unit, 0), gradients.final_bytes(unit));
    pager.park(gradients.holding(unit, 0));  // the update streams it from its record where it left memory
    pager.release(gradients.holding(unit, 0));
  }

  [[noreturn]] void fail_not_finite() const {
    fail(ErrorCode::kNotFinite, "the gradient of '{}' is not finite", layout.spec(*bad_parameter).name);
  }

  void add_gradient(ParameterId parameter, ConstArray gradient) {
    if (!is_held(layout.place(parameter).unit, true))
      refuse(ErrorCode::kState, "a gradient of '{}' is added, and its unit '{}' is not held for gradients",
             layout.spec(parameter).name, layout.units()[layout.place(parameter).unit].name);
    gradients.add(resources.threads, parameter, gradient);
  }

  StepResult finish_step_in_any_order(const StepSettings& given) {
    check_settings(given);
    if (!in_step || !held.empty())
      refuse(ErrorCode::kState, "step() is called {}",
             in_step ? fmt::format("while unit '{}' is held", layout.units()[held.front().unit].name)
                     : "without begin_step()");
    settings = given;
    accesses = recorder.end_step();
    std::vector<std::vector<HoldingId>> holdings;
    for (const Access& access : accesses) holdings.push_back(holdings_of(access));
    pager.set_schedule(std::move(holdings));
    pager.set_position(0);
    for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
      if (!gradients.any(unit)) continue;
      pager.acquire(gradients.holding(unit, 0), Pager::Use::kModify);
      finish_gradient(unit);
    }
    position = accesses.size();
    return finish_step();
  }

  bool updated_by_step(UnitId unit) const {
    return any_order ? gradients.any(unit) : gradients.uses(unit) > 0;
  }

  void check_settings(const StepSettings& given) const {
    const auto usable = [](double value) { return std::isfinite(value) && value >= 0; };
    for (const GroupSettings& group : given.groups)
      if (!usable(group.learning_rate) || !usable(group.weight_decay))
        refuse(ErrorCode::kInvalidArgument,
               "a learning rate of {} and a weight decay of {} are given; both must be 0 or more, and finite",
               group.learning_rate, group.weight_decay);
    if (!usable(given.clip) || !std::isfinite(given.gradient_factor))
      refuse(
          ErrorCode::kInvalidArgument,
          "a clip of {} and a gradient factor of {} are given; both must be finite, and the clip 0 or more",
          given.clip, given.gradient_factor);
    std::uint32_t needed = 0;
    for (ParameterId p = 0; p < layout.parameters(); ++p) needed = std::max(needed, layout.spec(p).group + 1);
    if (given.groups.size() < needed)
      refuse(ErrorCode::kInvalidArgument, "settings of {} parameter groups are given, and the model has {}",
             given.groups.size(), needed);
  }

  // No element is larger than the norm of all.
  void check_finite(double norm) {
    const bool overflow = !(norm <= static_cast<double>(std::numeric_limits<float>::max()));
    if (!bad_parameter && !overflow) return;
    for (UnitId unit = 0; unit < layout.units().size(); ++unit)
      if (gradients.uses(unit) > 0) pager.discard(gradients.holding(unit, 0));
    --steps;
    if (bad_parameter)
      refuse(ErrorCode::kNotFinite, "the gradient of '{}' is not finite; no parameter was changed",
             layout.spec(*bad_parameter).name);
    refuse(ErrorCode::kNotFinite,
           "the norm of the gradients is {} with a gradient factor of {}; no parameter was changed", norm,
           settings.gradient_factor);
  }

  StepResult finish_step() {
    if (!in_step || position != accesses.size() || !held.empty())
      refuse(ErrorCode::kState, "step() is called after {} of {} accesses, with {} units held", position,
             accesses.size(), held.size());
    in_step = false;
    position = 0;
    pager.set_position(0);
    StepResult result{gradients.norm() * std::abs(settings.gradient_factor), 1.0};
    if (!plan.clip) return result;
    check_finite(result.gradient_norm);
    // torch.nn.utils.clip_grad_norm_ has the same 1e-6.
    if (settings.clip > 0) clip_factor = std::min(1.0, settings.clip / (result.gradient_norm + 1e-6));
    result.clip_factor = clip_factor;
    for (const Access& access : accesses)
      if (access.parameters && updated_by_step(access.unit) && queue.current(access.unit))
        enqueue(access.unit);
    queue.advance();
    return result;
  }

  template <class Action>
  auto guarded(Action&& action) {
    if (!failure.empty())
      fail(ErrorCode::kState, "the engine has failed: {}; go on from the last checkpoint", failure);
    try {
      return action();
    } catch (const Refusal&) {
      throw;
    } catch (const std::exception& error) {  // also of a source that load() calls, or of the allocator
      failure = error.what();
      throw;
    } catch (...) {
      failure = "an exception of an unknown type";
      throw;
    }
  }

  Resources resources;
  const optim::Optimizer& optimizer;
  Plan plan;
  Layout layout;
  bool has_master;
  std::size_t groups;
  Pager pager;
  Gradients gradients;
  StateStore states;
  UpdatePipeline updates;
  std::vector<HoldingId> parameters;
  UpdateQueue queue;
  std::vector<Access> accesses;

  bool any_order;
  std::size_t held_units;
  Recorder recorder;

  StepSettings settings;
  std::uint64_t steps = 0;
  std::vector<std::uint64_t> applied;  // by parameter
  bool in_step = false;
  std::size_t position = 0;
  std::vector<Access> held;
  double clip_factor = 1;
  std::optional<ParameterId> bad_parameter;
  std::string failure;
};

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
    std::fill(state_->applied.begin(), state_->applied.end(), steps);
  });
}
void Engine::set_steps(ParameterId parameter, std::uint64_t steps) {
  state_->guarded([&] { state_->applied[parameter] = steps; });
}

void Engine::load(UnitId unit, const UnitSource& source) {
  State& s = *state_;
  std::exception_ptr source_failure;  // the engine itself is whole then
  s.guarded([&] {
    if (s.in_step)
      refuse(ErrorCode::kState, "unit '{}' is loaded in the middle of a step", s.layout.units()[unit].name);
    s.settle();
    std::byte* values = s.pager.acquire(s.parameters[unit], Pager::Use::kModify);
    source_failure = load_values({s.layout, s.states, s.updates, s.resources, s.has_master}, unit,
                                 {values, s.plan.dtype}, source);
    s.pager.written(s.parameters[unit], s.parameter_bytes(unit));
    s.pager.release(s.parameters[unit]);
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
    if (s.in_step)
      refuse(ErrorCode::kState, "unit '{}' is saved in the middle of a step", s.layout.units()[unit].name);
    s.settle();
    std::byte* values = s.pager.acquire(s.parameters[unit], Pager::Use::kRead);
    if (unit + 1 < s.parameters.size()) s.pager.prefetch_one(s.parameters[unit + 1]);
    sink_failure = save_values({s.layout, s.states, s.updates, s.resources, s.has_master}, unit,
                               {values, s.plan.dtype}, sink);
    s.pager.release(s.parameters[unit]);
  });
  if (sink_failure) std::rethrow_exception(sink_failure);
}

void Engine::begin_step(const StepSettings& settings) {
  State& s = *state_;
  s.guarded([&] {
    if (s.in_step) refuse(ErrorCode::kState, "begin_step() is called twice without step()");
    if (settings.clip > 0 && !s.plan.clip)
      refuse(ErrorCode::kInvalidArgument,
             "clipping by norm {} is asked for, and the plan was made without clipping", settings.clip);
    if (s.any_order)
      s.recorder.begin_step();
    else
      s.check_settings(settings);
    s.settings = settings;
    s.clip_factor = 1;
    s.bad_parameter.reset();
    s.gradients.begin_step();
    ++s.steps;
    s.in_step = true;
  });
}

void Engine::acquire(const Access& access) {
  state_->guarded([&] { state_->acquire(access); });
}
void Engine::release(const Access& access) {
  state_->guarded([&] { state_->release(access); });
}

ConstArray Engine::parameter(ParameterId parameter) const {
  State& s = *state_;
  return s.guarded([&] {
    const Layout::Place& place = s.layout.place(parameter);
    return ConstArray{s.pager.data(s.parameters[place.unit]), s.plan.dtype}.at(place.offset);
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

StepResult Engine::step() {
  return state_->guarded([&] { return state_->finish_step(); });
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

void Engine::progress() {
  state_->guarded([&] { state_->queue.advance(); });
}
void Engine::settle() {
  state_->guarded([&] { state_->settle(); });
}

Engine::Counters Engine::counters() const {
  return {state_->pager.wait_seconds() + state_->queue.wait_seconds(), state_->updates.seconds()};
}

}  // namespace sluice::engine
