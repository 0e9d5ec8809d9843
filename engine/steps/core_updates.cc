#include <algorithm>

#include "engine/steps/core.h"
#include "engine/updates/device_executor.h"
#include "kernels/elementwise.h"

// What updates, how gradients become those of all ranks, and how updates become due.
namespace sluice::engine {

std::unique_ptr<UpdateExecutor> Core::make_turns(Threads& threads) {
  return make_turn_executor(
      layout, optimizer, states.format(), wholes,
      {threads, resources.products, resources.trace, sums_of_ranks ? &*sums_of_ranks : nullptr});
}

std::unique_ptr<UpdateExecutor> Core::make_executor() {
  if (!gpu) return make_turns(resources.threads);
  if (std::ranges::all_of(plan.units, &UnitPlan::updated_by_cpu)) return nullptr;
  return make_device_executor(layout, optimizer, states.format(), *gpu, resources.threads);
}

std::unique_ptr<UpdateExecutor> Core::make_cpu_executor() {
  if (!gpu || std::ranges::none_of(plan.units, &UnitPlan::updated_by_cpu)) return nullptr;
  std::vector<std::unique_ptr<UpdateExecutor>> turns;
  if (optimizer.rounds() > 0) {
    turns.push_back(make_turns(resources.threads));
  } else {
    for (int i = 0; i < chunks_at_a_time(resources.threads.count()); ++i)
      turns.push_back(make_turns(one_thread));
  }
  return make_thread_executor(std::move(turns));
}

// A joint update acquires what it needs pass by pass; an update that follows its gradient, all of it here.
void Core::enqueue(UnitRange units, bool with_parameters) {
  const bool keeps = !plan.clip && units.size() == 1;
  if (keeps) queue.start_shared();
  for (UnitId unit = units.first; unit < units.end; ++unit)
    if (partitions_parameters(unit)) {
      parameter_shards->expect(unit);
      pager.outdate(parameters[unit]);
    }
  const ParameterId first = layout.first_parameter(units.first);
  if (units.size() > 1)  // the spans of a parameter count updates together
    std::fill(applied.begin() + first, applied.begin() + layout.end_parameter(units.end - 1), applied[first]);
  std::vector<UpdateQueue::Due> all;
  for (UnitId unit = units.first; unit < units.end; ++unit) {
    all.push_back(due_of(unit));
    // Nobody waits in backward to learn whether a gradient is finite: who updates the unit looks.
    if (checks_on_gpu()) all.back().refused = gradients.check_on_gpu(unit, states.by_cpu(unit));
    entrust(unit);
    if (keeps) keep_until_applied(unit, with_parameters, all.back());
  }
  queue.add(units, std::move(all));
}

// What the CPU updates, and a GPU computes with, leaves the GPU's frames for host memory or the disk.
void Core::entrust(UnitId unit) {
  if (!states.by_cpu(unit)) return;
  if (!pager.resident(parameters[unit])) pager.entrust(parameters[unit]);
  if (entrusts_gradient(unit)) pager.entrust(gradients.holding(unit, 0));
}

bool Core::entrusts_gradient(UnitId unit) const {
  const UnitPlan& placed = plan.units[unit];
  return states.by_cpu(unit) && placed.gradient_stored &&
         placed.tier(Part::kGradient) == allocator::Tier::kHost;
}

UpdateQueue::Due Core::due_of(UnitId unit) {
  UpdateQueue::Due due;
  for (const GroupSettings& group : settings.groups)
    due.groups.push_back({group.learning_rate, group.weight_decay, clip_factor * settings.gradient_factor,
                          steps, settings.clip_value, group.settings});
  for (ParameterId p = layout.first_parameter(unit); p < layout.end_parameter(unit); ++p)
    due.parameters.push_back({gradients.has(p) ? ++applied[p] : 0, gradients.factor(p)});
  return due;
}

// Holds the gradient and the parameters that an update needs, so that later gradients do not evict them.
void Core::keep_until_applied(UnitId unit, bool with_parameters, UpdateQueue::Due& due) {
  due.holds_gradient = !entrusts_gradient(unit);
  if (due.holds_gradient) pager.acquire(gradients.holding(unit, 0), Pager::Use::kRead);
  const bool elsewhere = partitions_parameters(unit) || states.by_cpu(unit);
  due.holds_parameters = !elsewhere && (with_parameters || pager.present(parameters[unit]));
  if (due.holds_parameters) pager.acquire(parameters[unit], Pager::Use::kRead);
}

// ---- sums over ranks ----

TransferGroup Core::sum_over_ranks(UnitId unit, std::span<const ParameterId> of, bool whole,
                                   const comm::SumOrder& order) {
  TransferGroup group;
  if (!ranks) return group;
  const auto sums = [&](std::size_t offset) {
    std::vector<Array> arrays;
    for (std::size_t i = 0; i < order.arrays[static_cast<std::size_t>(plan.ranks.rank)]; ++i)
      arrays.push_back({gradients.sum(unit, 0, i, 0) + offset, Dtype::kF32});
    return arrays;
  };
  if (whole) ranks->sum_gradient(unit, 0, sums(0), order, nullptr, group.add());
  for (const ParameterId p : of)
    if (!whole) ranks->sum_gradient_of(p, sums(gradients.offset(p, 0)), order, group.add());
  return group;
}

void Core::make_mean(UnitId unit, std::span<const ParameterId> of, double divisor) {
  const float* const first = gradients.sum(unit, 0, 0, 0) + own(unit).begin;
  for (const ParameterId p : of) {
    scale_gradient(p, 1 / divisor, own(unit));
    gradients.sum_squares_of(resources.threads, p, first, own(unit));
  }
}

void Core::scale_gradient(ParameterId parameter, double factor, ElementRange within) {
  const Layout::Location& at = layout.location(parameter);
  const std::size_t begin = std::clamp(within.begin, at.offset, at.offset + at.elements);
  const std::size_t end = std::clamp(within.end, begin, at.offset + at.elements);
  kernels::scale(resources.threads, end - begin, static_cast<float>(factor),
                 {gradients.data(parameter, 0) + begin - at.offset, Dtype::kF32});
}

}  // namespace sluice::engine
