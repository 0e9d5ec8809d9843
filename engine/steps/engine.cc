#include "engine/steps/engine.h"

#include <algorithm>

#include "engine/steps/core.h"
#include "engine/steps/refusal.h"

namespace sluice::engine {

Engine::Engine(const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer,
               const Resources& resources)
    : core_(std::make_unique<Core>(profile, plan, optimizer, resources)) {}
Engine::~Engine() = default;

const Layout& Engine::layout() const { return core_->layout; }
bool Engine::in_step() const { return core_->in_step; }
std::uint64_t Engine::steps() const { return core_->steps; }
std::uint64_t Engine::steps(ParameterId parameter) const { return core_->applied[parameter]; }
const std::string& Engine::failure() const { return core_->failure; }

Engine::Counters Engine::counters() const {
  return {core_->waits.read_seconds(), core_->waits.write_seconds(), core_->waits.rank_seconds(),
          (core_->executor ? core_->executor->seconds() : 0) +
              (core_->cpu_executor ? core_->cpu_executor->seconds() : 0)};
}

void Engine::load(UnitId unit, const UnitSource& source) {
  const std::exception_ptr failed = core_->guarded([&](Core& c) {
    check_load(unit);
    learn_of_refused();
    return c.values.load(unit, source);
  });
  if (failed) std::rethrow_exception(failed);
}

void Engine::load_all(const UnitSource& source) {
  core_->guarded([&](Core& c) {
    for (UnitId unit = 0; unit < c.layout.units().size(); ++unit) check_load(unit);
    learn_of_refused();
    for (UnitId unit = 0; unit < c.layout.units().size(); ++unit)
      if (const std::exception_ptr failed = c.values.load(unit, source)) std::rethrow_exception(failed);
  });
}

void Engine::save(UnitId unit, const UnitSink& sink) {
  const std::exception_ptr failed = core_->guarded([&](Core& c) {
    check_save(unit);
    learn_of_refused();
    return c.values.save(unit, sink);
  });
  if (failed) std::rethrow_exception(failed);
}

void Engine::save_alone(UnitId unit, const UnitSink& sink) {
  const std::exception_ptr failed = core_->guarded([&](Core& c) {
    ensure(!c.gpu, "the state of ranks on GPUs is taken by rank 0 alone");
    check_save(unit);
    return c.values.save(unit, sink, true);
  });
  if (failed) std::rethrow_exception(failed);
}

void Engine::state_is_taken(const std::string& error) {
  const std::exception_ptr failed = core_->guarded([&](Core& c) -> std::exception_ptr {
    try {
      c.values.state_is_taken(error);
    } catch (const StateRefused&) {
      return std::current_exception();
    }
    return nullptr;
  });
  if (failed) std::rethrow_exception(failed);
}

void Engine::serve_state() {
  core_->guarded([](Core& c) {
    if (c.ranks) c.values.serve(true);
  });
}

StateReads* Engine::state_reads() const {
  const bool has_part = core_->ranks && core_->ranks->any_partitioned();
  return has_part ? &core_->ranks->state_reads() : nullptr;
}

void Engine::save_own(UnitId unit, const UnitSink& sink, const WantedElements& wanted) {
  const std::exception_ptr failed = core_->guarded([&](Core& c) {
    check_save(unit);
    return c.values.save_own(unit, sink, wanted);
  });
  if (failed) std::rethrow_exception(failed);
}

Partition Engine::partition(UnitId unit) const {
  Partition found;
  if (!core_->partitions_state(unit)) return found;
  for (int rank = 0; rank < core_->ranks->size(); ++rank)
    found.shards.push_back(core_->ranks->shard(unit, rank));
  found.parameters = core_->partitions_parameters(unit);
  return found;
}

std::optional<int> Partition::owner(std::size_t element) const {
  if (shards.empty()) return of_whole();
  const auto found = std::ranges::upper_bound(shards, element, {}, &ElementRange::end);
  return rank(static_cast<std::size_t>(found - shards.begin()));
}

namespace {

// A larger number could overflow after further steps, and no run has made so many.
void check_steps(std::uint64_t steps) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 53;
  if (steps > kMost)
    refuse(ErrorCode::kInvalidArgument, "{} updates are stated; at most {} are possible", steps, kMost);
}

}  // namespace

void Engine::set_steps(std::uint64_t steps) {
  core_->guarded([&](Core& c) {
    check_steps(steps);
    learn_of_refused();
    c.steps = steps;
    for (ParameterId p = 0; p < c.applied.size(); ++p)
      c.applied[p] = c.layout.trainable(c.layout.location(p).unit) ? steps : 0;
  });
}

void Engine::set_steps(ParameterId parameter, std::uint64_t steps) {
  core_->guarded([&](Core& c) {
    check_steps(steps);
    learn_of_refused();
    c.applied[parameter] = steps;
  });
}

ConstArray Engine::parameter(ParameterId parameter) const {
  return core_->guarded([&](Core& c) {
    const Layout::Location& location = c.layout.location(parameter);
    const std::byte* const unit = c.pager.address(c.parameters[location.unit]);
    return ConstArray{unit, c.layout.dtype(location.unit)}.at(location.offset);
  });
}

void Engine::progress() {
  core_->guarded([&](Core& c) {
    check_queuing("progress() is called");
    // Other sections have posted receives for what this one computes.
    if (c.sections) c.report_work();
    c.queue.advance();
  });
}

void Engine::serve_ranks() {
  core().guarded([&](Core& c) {
    check_queuing("serve_ranks() is called");
    c.serve_ranks();
  });
}

void Engine::settle() {
  core_->guarded([&](Core& c) {
    check_queuing("settle() is called");
    c.settle();
  });
}

}  // namespace sluice::engine
