#include "engine/steps/any_order_engine.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <string>

#include "engine/steps/core.h"
#include "engine/steps/replan.h"
#include "engine/steps/shared_gradients.h"

namespace sluice::engine {

AnyOrderEngine::AnyOrderEngine(const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer,
                               const Resources& resources)
    : Engine(profile, plan, optimizer, resources),
      most_held_(profile.held_units),
      ends_micro_batches_(profile.ends_micro_batches),
      updated_(layout().parameters()),
      changed_(layout().units().size()),
      outdated_(layout().units().size()) {
  make_sums(profile);
  core().set_schedule(profile.schedule);
  for (UnitId unit = 0; unit < layout().units().size(); ++unit)
    by_address_.push_back({core().pager.address(core().parameters[unit]), unit});
  std::ranges::sort(by_address_, {}, &Addressed::begin);
}

AnyOrderEngine::~AnyOrderEngine() = default;

void AnyOrderEngine::make_sums(const Profile& profile) {
  const Plan& plan = core().plan;
  if (!core().ranks && !plan.reproducible) return;
  if (plan.reproducible && !plan.clip)
    fail(ErrorCode::kInvalidArgument,
         "updates in backward are asked for reproducibly, and gradients are then summed when all of them "
         "have come; update at the end of the step");
  if (!plan.clip && profile.micro_batches > 1)
    fail(ErrorCode::kInvalidArgument,
         "updates in backward are asked for with {} micro-batches of each rank in a step, which have to be "
         "added up before; have one, or update at the end of the step",
         profile.micro_batches);
  shared_ = std::make_unique<SharedGradients>(
      core(), profile.micro_batches, ends_micro_batches_,
      SharedGradients::Client{[this](UnitId unit) { return is_held(unit); },
                              [this](UnitId unit) { follow_final_gradients(unit); }});
}

bool AnyOrderEngine::has_parts() const { return core().ranks && core().ranks->any_partitioned(); }

std::vector<Hold> AnyOrderEngine::holds(UnitId unit) const {
  std::vector<Hold> holds;
  for (const Held& held : held_)
    if (held.unit == unit && !held.touched) holds.push_back(held.hold);
  return holds;
}

std::vector<UnitId> AnyOrderEngine::held_units() const {
  std::vector<UnitId> units;
  for (const Held& held : held_)
    if (!held.touched && std::ranges::count(units, held.unit) == 0) units.push_back(held.unit);
  return units;
}

bool AnyOrderEngine::has_gradient(ParameterId parameter) const { return core().gradients.has(parameter); }

std::optional<UnitId> AnyOrderEngine::unit_at(const std::byte* address) const {
  const auto next = std::ranges::upper_bound(by_address_, address, {}, &Addressed::begin);
  if (next == by_address_.begin()) return std::nullopt;
  const auto [begin, unit] = *std::prev(next);
  return address < begin + layout().unit_bytes(unit) ? std::optional(unit) : std::nullopt;
}

bool AnyOrderEngine::is_held(UnitId unit) const {
  return std::ranges::any_of(held_, [&](const Held& held) { return held.unit == unit; });
}

bool AnyOrderEngine::is_held_for_gradients(UnitId unit) const {
  return std::ranges::any_of(held_,
                             [&](const Held& held) { return held.unit == unit && with_gradient(held.hold); });
}

void AnyOrderEngine::check_load(UnitId unit) const {
  if (is_held(unit))
    refuse(ErrorCode::kState, "unit '{}' is loaded while it is held; release it", core().name_of(unit));
  require_no_capture("loaded", unit);
}

void AnyOrderEngine::check_save(UnitId unit) const { require_no_capture("saved", unit); }

void AnyOrderEngine::check_queuing(const char* what) const { require_no_capture(what, {}); }

void AnyOrderEngine::require_none_held(const char* what) const {
  if (!held_.empty())
    refuse(ErrorCode::kState, "{} while unit '{}' is held; release it", what,
           core().name_of(held_.front().unit));
}

void AnyOrderEngine::require_no_capture(const char* what, std::optional<UnitId> unit,
                                        std::optional<CUstream_st*> stream) const {
  const std::optional<DeviceWork>& gpu = core().gpu;
  if (gpu && gpu->device().is_capturing(stream.value_or(gpu->client())))
    refuse(ErrorCode::kState,
           "{} while the stream on which the client computes is captured into a graph of CUDA's, which would "
           "not do that when it is replayed; capture what is computed with units that are held, and nothing "
           "else",
           unit ? fmt::format("unit '{}' is {}", core().name_of(*unit), what) : std::string(what));
}

void AnyOrderEngine::use_stream(CUstream_st* stream) {
  core().guarded([&](Core& c) {
    if (!c.gpu)
      refuse(ErrorCode::kState, "a stream is given to an engine that computes on the CPU; leave it out");
    // A stream that is captured must not wait for one that is not, nor the other way round.
    for (CUstream_st* const either : {stream, c.gpu->client()})
      require_no_capture("another stream is named", {}, either);
    c.gpu->set_client(stream);
  });
}

// ---- the step ----

void AnyOrderEngine::begin_step(const StepSettings& settings) {
  core().guarded([&](Core& c) {
    if (settings.keep_gradients && !c.plan.clip)
      refuse(ErrorCode::kInvalidArgument,
             "gradients are to be kept over the step, and this plan applies and drops them in backward");
    if (!c.plan.clip) c.check_settings(settings);
    c.begin_step(settings);
    if (!c.plan.clip) c.gradients.drop_all();  // with clipping, gradients may have been kept
    std::fill(updated_.begin(), updated_.end(), false);
    refused_.clear();
    if (shared_) shared_->begin_step();
    recorder_.begin_step();
  });
}

StepResult AnyOrderEngine::step(const StepSettings& settings) {
  return core().guarded([&](Core& c) {
    if (c.plan.clip) c.check_settings(settings);
    if (!in_step()) refuse(ErrorCode::kState, "step() is called without begin_step()");
    require_none_held("step() is called");
    require_no_capture("step() is called", {});
    // Shards change once all ranks are here, so this rank must have no reads of them in flight.
    if (c.parameter_shards && c.plan.clip) c.settle();
    for (UnitId unit = 0; c.plan.clip && unit < layout().units().size(); ++unit) c.await_copies(unit);
    if (shared_) shared_->step(settings);
    require_all_or_none();
    const std::vector<Access>& accesses = recorder_.end_step();
    c.set_schedule(accesses, recorder_.held());
    c.pager.set_position(0);
    if (c.plan.clip) return update_all(accesses, settings);
    c.in_step = false;
    // Where state is partitioned, another rank may need updates of this one while its client makes no calls.
    if (has_parts())
      c.queue.settle_for_others();
    else
      c.queue.advance();
    const StepResult result = c.measure().result;
    learn_of_refused();
    refuse_what_the_gpu_refused();
    return result;
  });
}

void AnyOrderEngine::abandon_step() {
  core().guarded([&](Core& c) {
    if (!in_step()) refuse(ErrorCode::kState, "abandon_step() is called without begin_step()");
    require_no_capture("abandon_step() is called", {});
    if (shared_) shared_->abandon();
    learn_of_refused();
    refused_.clear();
    drop_all_gradients();
    while (!held_.empty()) let_go(std::prev(held_.end()));
    recorder_.begin_step();
    c.in_step = false;
    --c.steps;
  });
}

// ---- units ----

void AnyOrderEngine::check_acquire(UnitId unit, Hold hold) const {
  const Core& c = core();
  c.values.require(unit);
  if (with_gradient(hold) && !in_step())
    refuse(ErrorCode::kState, "unit '{}' is acquired for gradients outside of a step", c.name_of(unit));
  if (with_gradient(hold) && !layout().trainable(unit))
    refuse(ErrorCode::kInvalidArgument,
           "unit '{}' is acquired for gradients, and it is frozen; acquire it for reading", c.name_of(unit));
  if (!is_held(unit)) check_held_units(unit);
}

void AnyOrderEngine::check_held_units(UnitId wanted) const {
  std::set<UnitId> units;
  for (const Held& held : held_) units.insert(held.unit);
  if (units.size() < most_held_) return;
  std::string names;
  for (const UnitId unit : units) names += (names.empty() ? "'" : ", '") + core().name_of(unit) + "'";
  refuse(ErrorCode::kState,
         "unit '{}' is acquired while {} are held, and the plan was made for {} at once; release one, or "
         "state more",
         core().name_of(wanted), names, most_held_);
}

void AnyOrderEngine::acquire(UnitId unit, Hold hold) {
  core().guarded([&](Core&) { take({unit, hold, false}); });
}

void AnyOrderEngine::take(const Held& wanted) {
  Core& c = core();
  const UnitId unit = wanted.unit;
  if (c.sections) c.report_work();  // other sections wait for what this one computes
  check_acquire(unit, wanted.hold);
  require_no_capture("acquired", unit);
  const auto access_of = [](const Held& held) {
    return Access{held.unit, with_parameters(held.hold), with_gradient(held.hold) ? 0 : -1};
  };
  const Access access = access_of(wanted);
  std::vector<Access> held;
  if (c.gpu) std::ranges::transform(held_, std::back_inserter(held), access_of);
  c.pager.set_position(recorder_.follow(access, in_step(), std::move(held)));
  if (shared_) shared_->await(unit, with_gradient(wanted.hold));
  if (shared_ && in_step() && wanted.hold == Hold::kRead) shared_->read(unit);
  c.queue.ensure_updated(unit);
  if (access.parameters) {
    c.pager.acquire(c.parameters[unit], Pager::Use::kRead);
    c.pager.view(c.parameters[unit], false);
  }
  if (access.gradient_use == 0)
    for (const HoldingId gradient : c.gradients.holdings(unit, 0))
      c.pager.acquire(gradient, Pager::Use::kModify);
  held_.push_back(wanted);
  c.pager.prefetch(c.plan.prefetch);
  c.queue.advance();
  if (wanted.hold != Hold::kEdit) return;
  // The pager must not write the unit back while it is edited.
  c.pager.acquire(c.parameters[unit], Pager::Use::kModify);
  c.pager.view(c.parameters[unit], true);
}

void AnyOrderEngine::release(UnitId unit) {
  core().guarded([&](Core& c) {
    const auto last = std::find_if(held_.rbegin(), held_.rend(),
                                   [&](const Held& h) { return h.unit == unit && !h.touched; });
    if (last == held_.rend())
      refuse(ErrorCode::kState, "unit '{}' is released and was not acquired", c.name_of(unit));
    require_no_capture("released", unit);
    let_go(std::prev(last.base()));
    c.queue.advance();
  });
}

void AnyOrderEngine::let_go(HeldIterator at) {
  Core& c = core();
  const auto [unit, hold, touched] = *at;
  held_.erase(at);
  const HoldingId values = c.parameters[unit];
  if (hold == Hold::kEdit) take_edited(unit);
  if (hold == Hold::kEdit && c.ranks) share_edited(unit);
  if (with_parameters(hold)) {
    c.pager.conceal(values, false);
    c.pager.release(values);
  }
  if (hold == Hold::kEdit) {
    if (!c.partitions_parameters(unit)) c.pager.written(values, layout().unit_bytes(unit));
    c.pager.release(values);
  }
  if (outdated_[unit] && !c.pager.held(values)) {
    outdated_[unit] = false;
    c.pager.outdate(values);
    c.pager.unpark(values);
  }
  if (with_gradient(hold)) release_gradient(unit);
  if (c.gradients.uses(unit) == 0) return;
  if (shared_) shared_->released(unit);
  if (!c.plan.clip) follow_final_gradients(unit);  // last, since it throws for a gradient that is not finite
}

void AnyOrderEngine::take_edited(UnitId unit) {
  Core& c = core();
  c.pager.conceal(c.parameters[unit], true);  // ends the client's write access
  c.values.take_masters(unit);
}

// Every rank has the whole unit until its edit ends, and takes its own shard of it when all ranks have ended
// theirs.
void AnyOrderEngine::share_edited(UnitId unit) {
  Core& c = core();
  shared_->edited(unit);
  if (!c.partitions_parameters(unit)) return;
  c.values.wait_for_edit(unit);
  c.take_shard(unit);
  c.parameter_shards->expect(unit);
  c.parameter_shards->publish(unit);
  outdated_[unit] = true;
}

void AnyOrderEngine::release_gradient(UnitId unit) {
  Core& c = core();
  const bool last = !is_held_for_gradients(unit), any = c.gradients.any(unit);
  const std::size_t sums = !any ? 0 : shared_ ? shared_->sums_of(unit) : 1;
  const std::vector<HoldingId>& gradients = c.gradients.holdings(unit, 0);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (last && i < sums && changed_[unit]) c.pager.written(gradients[i], c.gradients.bytes(unit, 0));
    c.pager.release(gradients[i]);
    if (last && i >= sums) c.pager.discard(gradients[i]);
  }
  if (last && any) changed_[unit] = false;
}

// ---- page faults ----

void AnyOrderEngine::serve_touches(allocator::TouchServer& server) const {
  core().pager.serve_touches(server);
}

AnyOrderEngine::HeldIterator AnyOrderEngine::oldest_touched() const {
  return std::ranges::find_if(held_, &Held::touched);
}

void AnyOrderEngine::touch(UnitId unit, bool write) {
  core().guarded([&](Core&) {
    const bool there = std::ranges::any_of(held_, [&](const Held& h) {
      return h.touched && h.unit == unit && (h.hold == Hold::kEdit || !write);
    });
    if (there) return;
    require_no_capture("touched", unit);
    while (true) {
      try {
        return take({unit, write ? Hold::kEdit : Hold::kRead, true});
      } catch (const Refusal&) {
        if (oldest_touched() == held_.end()) throw;
      }
      let_go(oldest_touched());
    }
  });
}

void AnyOrderEngine::release_touched() {
  core().guarded([&](Core&) {
    for (auto at = oldest_touched(); at != held_.end(); at = oldest_touched()) {
      require_no_capture("released", at->unit);
      let_go(at);
    }
  });
}

// ---- shutdown, change of plan ----

void AnyOrderEngine::leave(bool with_values, const std::function<void(UnitId, allocator::FormerHome)>& take) {
  Core& c = core();
  if (left_) refuse(ErrorCode::kState, "the parameters have left the engine already; destroy it");
  if (c.gpu)
    refuse(ErrorCode::kState,
           "parameters in a GPU's memory cannot leave their engine yet; save them instead");
  const auto go = [&] {
    left_ = true;
    c.failure = "its parameters have left it";
    if (c.ranks) c.ranks->state_reads().wait_until_sent();
    engine::leave(c, with_values, take);
    // Other ranks still gather units from this rank's shards.
    if (with_values && c.parameter_shards) c.ranks->exchange("the end of the engines", {}, {});
  };
  if (!with_values) return go();
  c.guarded([&](Core&) {
    require_none_held("the engine is left");
    if (const auto unit = shared_ ? shared_->under_way() : std::nullopt)
      refuse(ErrorCode::kState,
             "the engine is left while the gradient of '{}' is being summed; step, or abandon the step",
             c.name_of(*unit));
    for (UnitId unit = 0; unit < layout().units().size(); ++unit) c.values.require(unit);
    go();
  });
}

std::int64_t AnyOrderEngine::growth_of_leaving() const {
  const Leaving leaving = core().pager.leaving();
  return static_cast<std::int64_t>(leaving.growth) - static_cast<std::int64_t>(leaving.given_back) -
         static_cast<std::int64_t>(core().states.resident_bytes() + core().wholes.resident_bytes());
}

void AnyOrderEngine::check_replan(const Plan& next) const {
  const Core& c = core();
  if (c.gpu)
    refuse(ErrorCode::kState, "an engine that computes on a GPU keeps its plan; make another engine");
  ensure(next.chunk_elements == c.plan.chunk_elements && next.clip == c.plan.clip &&
             next.extent_bytes == c.plan.extent_bytes && next.stages() == c.plan.stages() &&
             next.units.size() == c.plan.units.size(),
         "the plan was made for another engine");
  if (in_step())
    refuse(ErrorCode::kState, "the plan is changed in the middle of a step; finish or abandon the step");
  require_none_held("the plan is changed");
  for (UnitId unit = 0; unit < layout().units().size(); ++unit) {
    c.values.require(unit);
    if (c.gradients.any(unit))
      refuse(ErrorCode::kState,
             "the plan is changed while '{}' has gradients; drop them, or finish their step",
             c.name_of(unit));
  }
}

void AnyOrderEngine::replan(const Plan& plan) {
  core().guarded([&](Core& c) {
    check_replan(plan);
    engine::replan(c, plan);
  });
}

}  // namespace sluice::engine
