#include "engine/steps/scheduled_engine.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>

#include "core/bytes.h"
#include "engine/steps/core.h"
#include "kernels/elementwise.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kAny = std::numeric_limits<std::size_t>::max();

}  // namespace

ScheduledEngine::ScheduledEngine(const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer,
                                 const Resources& resources)
    : Engine(profile, plan, optimizer, resources),
      twin_(profile.twin),
      sums_(plan.reproducible, plan.ranks, profile.micro_batches, profile.pieces),
      order_(sums_.order()),
      given_(given_elements(layout(), profile, plan.ranks)),
      touched_(layout(), profile, plan.ranks),
      finished_(profile.units.size()) {
  const std::size_t groups = profile.repeats(plan.group);
  for (std::size_t group = 0; group < groups; ++group)
    for (Access access : profile.schedule) {
      access.final = access.final && group + 1 == groups;
      accesses_.push_back(access);
    }
  for (ParameterId p = 0; p < layout().parameters(); ++p)
    written_.emplace_back(static_cast<std::size_t>(layout().spec(p).uses));
  for (auto access = accesses_.begin(); access != accesses_.end(); ++access)
    ends_use_.push_back(std::none_of(access + 1, accesses_.end(), [&](const Access& later) {
      return later.unit == access->unit && later.gradient_use == access->gradient_use;
    }));
  for (auto access = accesses_.begin(); access != accesses_.end(); ++access)
    ends_reading_.push_back(std::none_of(access + 1, accesses_.end(), [&](const Access& later) {
      return later.unit == access->unit && later.parameters;
    }));
  core().set_schedule(accesses_);
}

void ScheduledEngine::check_between_steps(UnitId unit, const char* verb) const {
  if (in_step())
    refuse(ErrorCode::kState, "unit '{}' is {} in the middle of a step", core().name_of(unit), verb);
}

void ScheduledEngine::check_load(UnitId unit) const { check_between_steps(unit, "loaded"); }
void ScheduledEngine::check_save(UnitId unit) const { check_between_steps(unit, "saved"); }

void ScheduledEngine::begin_step(const StepSettings& settings) {
  core().guarded([&](Core& c) {
    c.check_settings(settings);
    c.begin_step(settings);
    c.gradients.drop_all();
    for (auto& uses : written_) std::ranges::fill(uses, Written{});
    std::fill(finished_.begin(), finished_.end(), false);
    touched_.begin_step();
    unforeseen_ = needed_first_;
  });
}

void ScheduledEngine::require_next(const Access& asked) const {
  if (in_step() && position_ < accesses_.size()) {
    Access next = accesses_[position_];
    next.final = asked.final;  // only the schedule knows this
    if (next == asked) return;
  }
  refuse(ErrorCode::kState, "unit '{}' is acquired out of the schedule (access {} of {})",
         core().name_of(asked.unit), position_, accesses_.size());
}

void ScheduledEngine::acquire(const Access& asked) {
  core().guarded([&](Core& c) {
    require_next(asked);
    // The plan has frames for gradients that are summed during one more access.
    finish_sums(!sums_of_ranks_.empty() && sums_of_ranks_.front().position < position_ ? 0 : kAny);
    const Access& access = accesses_[position_];
    c.pager.set_position(position_);
    c.queue.ensure_updated(access.unit);  // a pending update owns the gradient, too
    if (access.parameters) c.pager.acquire(c.parameters[access.unit], Pager::Use::kRead);
    for (int use = 0; use < c.gradients.uses(access.unit); ++use)
      if (use == access.gradient_use || access.final)
        for (const HoldingId gradient : c.gradients.holdings(access.unit, use))
          c.pager.acquire(gradient, Pager::Use::kModify);
    const auto waiting = [&](const Access& a) {
      return a.gradient_use < 0 ? 0 : (sums_.most() - 1) * use_elements(layout(), a.unit, a.gradient_use);
    };
    std::size_t waiting_from = 0;
    for (const Held& h : held_) waiting_from += waiting(h.access);
    ensure((waiting_from + waiting(access)) * sizeof(float) <= c.plan.sums_bytes,
           "gradients of '{}' wait to be added while too many others do", c.name_of(access.unit));
    held_.push_back({access, waiting_from, ends_use_[position_], ends_reading_[position_]});
    ++position_;
    c.pager.prefetch(c.plan.prefetch);
    c.queue.advance();
  });
}

ScheduledEngine::Held ScheduledEngine::take_held(const Access& access) {
  const auto found = std::ranges::find_if(held_, [&](const Held& h) {
    return h.access.unit == access.unit && h.access.parameters == access.parameters &&
           h.access.gradient_use == access.gradient_use;
  });
  if (found == held_.end())
    refuse(ErrorCode::kState, "unit '{}' is released and was not acquired", core().name_of(access.unit));
  const Held taken = *found;
  held_.erase(found);
  return taken;
}

void ScheduledEngine::release(const Access& access) {
  core().guarded([&](Core& c) {
    const Held released = take_held(access);
    if (released.access.parameters) c.pager.release(c.parameters[released.access.unit]);
    // Nothing of this step needs the parameters any more. Outdating them keeps this rank from reading a shard
    // while it is updated, and from prefetching for the next step what will have changed by then.
    if (released.access.parameters && released.ends_reading &&
        c.partitions_parameters(released.access.unit) && c.gradients.uses(released.access.unit) > 0)
      c.pager.outdate(c.parameters[released.access.unit]);
    if (released.access.final)
      begin_sum(released);
    else if (released.access.gradient_use >= 0) {
      begin_early_sum(released);
      store_gradient(released);
    }
    finish_sums(kAny);
    c.queue.advance();
  });
}

GradientTarget ScheduledEngine::gradient(ParameterId parameter, int use, std::size_t micro_batch) {
  if (touched_.by_rows(parameter, use))
    refuse(ErrorCode::kState, "the gradient of '{}' is written, and not said in which rows",
           layout().spec(parameter).name);
  return target(parameter, use, micro_batch);
}

GradientTarget ScheduledEngine::gradient_of_rows(ParameterId parameter, int use, std::size_t micro_batch,
                                                 std::span<const std::int32_t> rows) {
  std::vector<std::int32_t> first_touched;
  if (touched_.by_rows(parameter, use)) first_touched = touched_.touch(parameter, rows);
  GradientTarget written = target(parameter, use, micro_batch);
  if (!keeps_rows_alone(parameter, use)) return written;
  const ParameterSpec& spec = layout().spec(parameter);
  const std::size_t width = spec.elements() / spec.shape.front();
  for (const std::int32_t row : first_touched)
    std::fill_n(written.data + static_cast<std::size_t>(row) * width, width, 0.0f);
  return {written.data, true};
}

// Whether rows of a gradient that were not touched are never read.
bool ScheduledEngine::keeps_rows_alone(ParameterId parameter, int use) const {
  return touched_.by_rows(parameter, use) && !sums_.pairwise();
}

GradientTarget ScheduledEngine::target(ParameterId parameter, int use, std::size_t micro_batch) {
  return core().guarded([&](Core& c) {
    const UnitId unit = layout().location(parameter).unit;
    const ParameterSpec& spec = layout().spec(parameter);
    const auto held = std::ranges::find_if(
        held_, [&](const Held& h) { return h.access.unit == unit && h.access.gradient_use == use; });
    if (held == held_.end() || use < 0 || use >= spec.uses)
      refuse(ErrorCode::kState, "the gradient of '{}' is written without its unit", spec.name);
    Written& written = written_[parameter][static_cast<std::size_t>(use)];
    if (written.last && *written.last >= micro_batch)
      refuse(ErrorCode::kState,
             "the gradient of '{}' for micro-batch {} comes after that of micro-batch {}; they are added in "
             "order",
             spec.name, micro_batch, *written.last);
    if (!sums_.pairwise())
      return GradientTarget{c.gradients.data(parameter, use),
                            std::exchange(written.last, micro_batch).has_value()};
    if (micro_batch != (written.last ? *written.last + 1 : 0))
      refuse(ErrorCode::kState, "the gradient of '{}' for a micro-batch before {} was not written", spec.name,
             micro_batch);
    add_waiting(parameter, use, held->waiting_from);
    written = {micro_batch, true};
    float* const sum = c.gradients.sum(unit, use, sums_.height(micro_batch), held->waiting_from);
    return GradientTarget{sum + c.gradients.offset(parameter, use), false};
  });
}

// Adds the gradient that was written last to the sums of earlier micro-batches.
void ScheduledEngine::add_waiting(ParameterId parameter, int use, std::size_t waiting_from) {
  Core& c = core();
  Written& written = written_[parameter][static_cast<std::size_t>(use)];
  if (!std::exchange(written.waits, false)) return;
  const Layout::Location& location = layout().location(parameter);
  const std::size_t offset = c.gradients.offset(parameter, use);
  const auto sum = [&](std::size_t below) {
    return Array{c.gradients.sum(location.unit, use, below, waiting_from) + offset, Dtype::kF32};
  };
  std::size_t top = sums_.height(*written.last);
  for (std::size_t merge = sums_.merges(*written.last); merge > 0; --merge, --top)
    kernels::add(c.resources.threads, location.elements, sum(top - 1), sum(top), sum(top - 1));
}

void ScheduledEngine::store_gradient(const Held& held) {
  Core& c = core();
  const auto [unit, parameters, use, final, joined, chunk] = held.access;
  std::size_t sums = 1;
  for (ParameterId p = layout().first_parameter(unit); p < layout().end_parameter(unit); ++p) {
    if (layout().spec(p).uses <= use) continue;
    add_waiting(p, use, held.waiting_from);
    const auto& last = written_[p][static_cast<std::size_t>(use)].last;
    if (last) sums = std::max(sums, sums_.height(*last + 1));
  }
  const std::vector<HoldingId>& holdings = c.gradients.holdings(unit, use);
  for (std::size_t i = 0; i < holdings.size(); ++i) {
    if (i < sums) c.pager.written(holdings[i], c.gradients.bytes(unit, use));
    c.pager.release(holdings[i]);
    if (i >= sums) c.pager.discard(holdings[i]);
  }
}

bool ScheduledEngine::have_final_gradients(UnitRange units) const {
  return std::all_of(finished_.begin() + units.first, finished_.begin() + units.end, std::identity());
}

void ScheduledEngine::enqueue(UnitRange units) {
  Core& c = core();
  for (UnitId unit = units.first; unit < units.end; ++unit)
    std::erase(unforeseen_, unit);  // its next update is not of this step
  // During the sum over ranks the parameters may have been evicted. An update that waits for them must not
  // precede others whose gradients hold all frames.
  c.enqueue(units, c.ranks.has_value());
  for (UnitId unit = units.first; unit < units.end; ++unit) c.gradients.hand_over(unit);
}

StepResult ScheduledEngine::step() {
  return core().guarded([&](Core& c) {
    if (!in_step() || position_ != accesses_.size() || !held_.empty())
      refuse(ErrorCode::kState, "step() is called after {} of {} accesses, with {} units held", position_,
             accesses_.size(), held_.size());
    finish_sums(std::nullopt);
    c.in_step = false;
    position_ = 0;
    c.pager.set_position(0);
    std::vector<ParameterId> all(layout().parameters());
    std::iota(all.begin(), all.end(), ParameterId{0});
    c.gather_squares(all);
    const Core::Measured measured = c.measure();
    StepResult result = measured.result;
    if (!c.plan.clip) return result;
    if (!Core::usable(measured)) {
      forget_step();
      c.refuse_not_finite(measured);
    }
    c.clip(result);
    for (const Access& access : accesses_)
      if (access.parameters && c.gradients.uses(access.unit) > 0 && c.queue.current(access.unit))
        enqueue(c.together(access.unit));
    c.queue.advance();
    return result;
  });
}

void ScheduledEngine::serve_ranks() {
  core().guarded([&](Core& c) {
    finish_sums(kAny);
    c.serve_ranks();
  });
}

void ScheduledEngine::forget_step() {
  Core& c = core();
  for (UnitId unit = 0; unit < layout().units().size(); ++unit)
    if (c.gradients.uses(unit) > 0) c.pager.discard(c.gradients.holding(unit, 0));
  for (UnitId unit = 0; unit < layout().units().size(); ++unit)
    if (c.partitions_parameters(unit)) c.pager.unpark(c.parameters[unit]);
  c.updates.forget_foreseen();
  --c.steps;
}

void ScheduledEngine::acquire_for_reading(UnitId unit) {
  core().guarded([&](Core& c) {
    check_between_steps(unit, "read");
    c.queue.ensure_updated(unit);
    c.pager.acquire(c.parameters[unit], Pager::Use::kRead);
    if (unit + 1 < c.parameters.size() && c.queue.current(unit + 1))
      c.pager.prefetch_one(c.parameters[unit + 1]);
    c.queue.advance();
  });
}

void ScheduledEngine::release_from_reading(UnitId unit) {
  core().guarded([&](Core& c) { c.pager.release(c.parameters[unit]); });
}

// Units are prefetched in the order of the schedule, as many as fit, or the first one in part.
void ScheduledEngine::set_lendable(std::span<std::byte> memory) {
  core().guarded([&](Core& c) {
    c.settle();
    const auto streamed = [&](const UnitPlan& unit) {
      return c.plan.clip && !unit.resident(Part::kGradient);
    };
    c.updates.set_lendable(memory, std::ranges::any_of(c.plan.units, streamed));
    needed_first_.clear();
    std::size_t free = c.updates.lendable_slots();
    for (const Access& access : accesses_) {
      const std::size_t chunks = c.states.format().shards().chunks(access.unit);
      if (c.states.resident(access.unit) || std::ranges::count(needed_first_, access.unit) > 0) continue;
      if (free == 0 || (chunks > free && !needed_first_.empty())) break;
      needed_first_.insert(needed_first_.begin(), access.unit);
      free -= std::min(free, chunks);
    }
  });
}

void ScheduledEngine::lend(std::size_t from) {
  core().guarded([&](Core& c) {
    if (!in_step()) refuse(ErrorCode::kState, "memory is lent outside of a step");
    c.updates.lend(from);
    while (!unforeseen_.empty() && c.queue.current(unforeseen_.front()) &&
           !c.updates.under_way(unforeseen_.front())) {
      c.updates.foresee(unforeseen_.front());
      unforeseen_.erase(unforeseen_.begin());
    }
  });
}

void ScheduledEngine::take_back(std::size_t until) {
  core().guarded([&](Core& c) { c.queue.take_back(until); });
}

void ScheduledEngine::end_lending() noexcept {
  try {
    take_back(SIZE_MAX);
  } catch (...) {  // NOLINT: the next call on the engine reports the error
  }
  core().updates.wait_for_lent();
}

}  // namespace sluice::engine
