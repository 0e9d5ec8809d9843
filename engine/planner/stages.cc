#include "engine/planner/stages.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/layout/kind.h"
#include "engine/planner/placement.h"
#include "engine/planner/planner.h"
#include "engine/planner/tiers.h"

namespace sluice::engine {

using allocator::Tier;

namespace {

// With these a plan is found in seconds.
constexpr std::size_t kMostPrefetch = 64, kMostMicroBatches = 1'000'000;

std::uint64_t traffic(const Plan& plan) {
  return plan.step_bytes_read + plan.step_bytes_written + plan.step_bytes_received;
}

// How many sums of gradients are kept depends on the group where they are added pairwise.
std::optional<Plan> find_in_groups(const PlanInputs& in) {
  if (!in.request.reproducible || in.request.group) return find_plan(in);
  std::optional<Plan> best;
  PlanRequest at = in.request;
  for (const std::size_t group : group_sizes_of(in.profile.micro_batches)) {
    at.group = group;
    std::optional<Plan> plan = find_plan(in.with(at));
    if (plan && (!best || faster(*plan, *best))) best = std::move(plan);
  }
  return best;
}

}  // namespace

bool faster(const Plan& a, const Plan& b) {
  if (std::abs(a.time.step - b.time.step) > kSame * b.time.step) return a.time.step < b.time.step;
  const auto of_a = static_cast<double>(traffic(a)), of_b = static_cast<double>(traffic(b));
  if (std::abs(of_a - of_b) > 0.05 * of_b) return of_a < of_b;
  if (a.uses_disk() && a.prefetch != b.prefetch) return a.prefetch > b.prefetch;
  if (a.staging_slots != b.staging_slots) return a.staging_slots > b.staging_slots;
  if (a.relay_pieces != b.relay_pieces) return a.relay_pieces > b.relay_pieces;
  return a.peak_memory < b.peak_memory;
}

// Of very many sizes, those of which each is an eighth smaller than the one before will do.
std::vector<std::size_t> group_sizes_of(std::size_t micro_batches) {
  constexpr std::size_t kAllOf = 4096, kPart = 8;
  std::vector<std::size_t> sizes;
  for (std::size_t size = micro_batches; size > 0;) {
    if (micro_batches <= kAllOf || sizes.empty() || size <= sizes.back() - sizes.back() / kPart)
      sizes.push_back(size);
    size = size == 1 ? 0 : divide_up(micro_batches, divide_up(micro_batches, size - 1));
  }
  return sizes;
}

namespace {

// One stage for all units: the least with which everything is in memory, since more would have to be sent at
// a higher one. Where there is none, the fastest stage; or the highest, which needs the disk least, where it
// is not known what sending costs.
std::optional<Plan> find_alike(const PlanInputs& in) {
  std::optional<Plan> best;
  PlanRequest at = in.request;
  for (at.stage = 0; *at.stage <= kMostStage; ++*at.stage) {
    std::optional<Plan> plan = find_in_groups(in.with(at));
    if (plan && !plan->uses_disk() && *at.stage < kMostStage) return plan;
    if (plan && (!best || !in.rates.link || faster(*plan, *best))) best = std::move(plan);
  }
  return best;
}

// Chooses a stage for each unit: first one for all, then another for some.
class StagesOfUnits {
 public:
  explicit StagesOfUnits(const PlanInputs& in) : in_(in), layout_(in.profile.units) {}

  std::optional<Plan> find() {
    for (std::size_t stage = 0; stage <= kMostStage; ++stage)
      try_stages(std::vector(in_.profile.units.size(), stage), in_.request.group);
    if (!best_) return std::nullopt;
    const std::optional<std::size_t> group = best_->group;
    keep_whole(group);
    replicate(group);
    if (!best_->one_stage()) try_stages(best_->stages(), in_.request.group);
    return best_;
  }

 private:
  using Stages = std::vector<std::size_t>;

  void try_stages(const Stages& stages, std::optional<std::size_t> group) {
    PlanRequest at = in_.request;
    at.stages = stages;
    at.group = group;
    if (auto plan = find_in_groups(in_.with(at))) offer(std::move(*plan));
  }

  void offer(Plan&& plan) {
    const bool first = !best_.has_value();
    const double fastest = first ? plan.time.step : std::min(fastest_, plan.time.step);
    const bool is_faster = !first && plan.time.step < (1 - kSame) * best_->time.step;
    const bool moves_less =
        !first && plan.time.step <= (1 + kSame) * fastest && traffic(plan) < traffic(*best_);
    if (first || is_faster || moves_less) best_ = std::move(plan);
    fastest_ = fastest;
  }

  // Returns the bytes that the rank receives for each unit in a step, with that stage for all units.
  std::vector<std::uint64_t> received_at(std::size_t stage) const {
    PlanRequest at = in_.request;
    at.stage = stage;
    const Placement placement(in_.profile, in_.optimizer, at);
    const std::size_t groups = in_.profile.repeats(best_->group);
    std::vector<std::uint64_t> received;
    for (UnitId unit = 0; unit < in_.profile.units.size(); ++unit) {
      UnitPlan plan;
      if (placement.partitions_parameters(unit)) plan.place(Part::kParameters, Tier::kRanks);
      received.push_back(placement.received_bytes(unit, plan, groups));
    }
    return received;
  }

  // Of the units whose parameters may be partitioned, those that are fetched most often are whole first, and
  // of equal ones those that forward needs last: what the others have updated of them comes while it
  // computes. As many are whole as is best, which is looked for around the quarters.
  void keep_whole(std::optional<std::size_t> group) {
    const std::vector<std::uint64_t> in_parts = received_at(kMostStage), whole = received_at(kMostStage - 1);
    std::vector<UnitId> order;
    for (const Access& access : in_.profile.schedule)
      if (in_parts[access.unit] != whole[access.unit] && std::ranges::count(order, access.unit) == 0)
        order.push_back(access.unit);
    std::ranges::reverse(order);
    const auto saved = [&](UnitId unit) {  // for each byte of memory
      return (static_cast<double>(in_parts[unit]) - static_cast<double>(whole[unit])) /
             static_cast<double>(layout_.unit_bytes(unit));
    };
    std::ranges::stable_sort(order, std::greater<>(), saved);
    std::size_t most = 0;
    const auto try_whole = [&](std::size_t count) {
      Stages stages(in_.profile.units.size(), kMostStage);
      for (std::size_t i = 0; i < count; ++i) stages[order[i]] = kMostStage - 1;
      try_stages(stages, group);
      if (best_->stages() == stages) most = count;
    };
    if (order.size() < 2 || (best_->one_stage() && *best_->one_stage() < kMostStage && !best_->uses_disk()))
      return;
    for (const std::size_t quarters : {1, 2, 3}) try_whole(quarters * order.size() / 4);
    for (std::size_t step = divide_up(order.size(), 8); step > 0; step /= 2)
      for (const bool more : {true, false}) {
        const std::size_t count = more ? most + step : most - std::min(most, step);
        if (count > 0 && count < order.size()) try_whole(count);
      }
  }

  // Units of which less is received where each rank has and updates everything, as tables of which a step
  // touches few rows, are replicated.
  void replicate(std::optional<std::size_t> group) {
    const std::vector<std::uint64_t> in_parts = received_at(1), replicated = received_at(0);
    std::vector<bool> replicate(in_.profile.units.size());
    for (UnitId unit = 0; unit < replicate.size(); ++unit) {
      std::uint64_t before = 0, then = 0;
      const UnitRange together = updated_together(layout_, in_.optimizer, unit);
      for (UnitId other = together.first; other < together.end; ++other) {
        before += in_parts[other];
        then += replicated[other];
      }
      replicate[unit] = then < before;
    }
    if (std::ranges::count(replicate, true) == 0) return;
    for (const Stages& others : {best_->stages(), Stages(replicate.size(), 1), Stages(replicate.size(), 2)}) {
      Stages stages = others;
      for (UnitId unit = 0; unit < stages.size(); ++unit)
        if (replicate[unit]) stages[unit] = 0;
      if (stages != best_->stages()) try_stages(stages, group);
    }
  }

  const PlanInputs in_;
  const Layout layout_;
  std::optional<Plan> best_;
  double fastest_ = 0;  // of all that were tried
};

// The schedule of a whole step is of one group.
std::size_t group_of_step(const WholeStep& step, const PlanRequest& request) {
  if (request.group && *request.group != step.group)
    fail(ErrorCode::kInvalidArgument,
         "a group of {} micro-batches is asked for, and the step has groups of {}", *request.group,
         step.group);
  return step.group;
}

PlanRequest on_device(const Profile& profile, const PlanRequest& request) {
  if (request.reproducible)
    fail(ErrorCode::kInvalidArgument,
         "device memory is given to a reproducible run, which the CPU computes; leave one of them out");
  if (!profile.any_order)
    fail(ErrorCode::kInvalidArgument,
         "device memory is given to a native model, which the CPU computes; leave it out");
  PlanRequest result = request;
  result.compute = Tier::kDevice;
  if (request.ranks.size == 1) result.stage = 0;
  return result;
}

// The stages that may be, and with each where shards may lie.
std::vector<PlanRequest> requests_for(const PlanInputs& in, const PlanRequest& asked) {
  std::vector<PlanRequest> requests;
  const auto add = [&](const PlanRequest& request) {
    const Placement first(in.profile, in.optimizer, request);
    if (!first.partitions_any_parameters()) return requests.push_back(request);
    for (const ShardPlace shards : {ShardPlace::kGpu, ShardPlace::kPassed, ShardPlace::kHost}) {
      if (shards < first.shards() || shards != request.shards.value_or(shards)) continue;
      if (first.shards_on_gpus() && shards != ShardPlace::kGpu && asks_for_updates_by_gpu(request)) continue;
      requests.push_back(request);
      requests.back().shards = shards;
    }
  };
  const bool gives_stage = asked.stage || !asked.stages.empty();
  if (gives_stage) add(asked);
  for (const std::size_t stage : {std::size_t{0}, std::size_t{1}, kMostStage}) {
    if (gives_stage) break;
    PlanRequest at = asked;
    at.stages.assign(in.profile.units.size(), stage);
    const bool gpus_keep_shards = at.ranks.gpus_read() && at.place(Part::kParameters) != Tier::kDisk;
    if (stage < kMostStage || !asks_for_updates_by_gpu(at) || gpus_keep_shards) add(at);
  }
  return requests;
}

// The one with the shortest step with which nothing is on disk, and of those that are alike the first one; or
// else the one that moves least from the disk and to it.
std::optional<Plan> best_of(const PlanInputs& in, const std::vector<PlanRequest>& requests) {
  const auto moved = [](const Plan& of) { return of.step_bytes_read + of.step_bytes_written; };
  const auto is_better = [&](const Plan& plan, const Plan& than) {
    if (plan.uses_disk() || than.uses_disk()) return moved(plan) < moved(than);
    return plan.device_time.step < kAlike * than.device_time.step;
  };
  std::optional<Plan> best;
  for (const PlanRequest& request : requests) {
    std::optional<Plan> plan = find_plan(in.with(request));
    if (plan && (!best || is_better(*plan, *best))) best = std::move(plan);
  }
  return best;
}

// Where parts of gradients do not fit in memory, or are asked to be on disk, gradients stay whole, unless
// that has other bits. Changes `asked` to what was tried last.
std::optional<Plan> find_for(const PlanInputs& in, PlanRequest& asked) {
  if (asked.sums_each_backward) return best_of(in, requests_for(in, asked));
  asked.whole_gradients = asked.place(Part::kGradient) == Tier::kDisk;
  std::optional<Plan> best = best_of(in, requests_for(in, asked));
  if (!best && !std::exchange(asked.whole_gradients, true)) best = best_of(in, requests_for(in, asked));
  return best;
}

// Of two plans that differ in what joins the GPUs.
bool is_joined_better(const Plan& plan, const Plan& than) {
  if (plan.uses_disk() != than.uses_disk()) return than.uses_disk();
  return plan.device_time.step < kAlike * than.device_time.step;
}

// Whether ranks with GPUs that meet may do without: GPUs do not update shards of the host's.
bool may_join_by_host(const PlanRequest& asked) {
  const bool has_shards = asked.stage == kMostStage || std::ranges::count(asked.stages, kMostStage) > 0;
  return asked.chooses_links && asked.ranks.gpus_meet && !(has_shards && asks_for_updates_by_gpu(asked));
}

// Where a GPU computes, whose memory is budget.device.
Plan make_device_plan(const PlanInputs& in) {
  PlanRequest asked = on_device(in.profile, in.request);
  std::optional<Plan> best = find_for(in, asked);
  if (may_join_by_host(asked)) {
    asked.ranks.gpus_meet = asked.ranks.by_nccl = false;
    std::optional<Plan> in_host = find_for(in, asked);
    if (best && !in_host) best->needs_gpus_to_meet = true;
    if (in_host && (!best || is_joined_better(*in_host, *best))) best = std::move(in_host);
  }
  if (best) return *best;
  refuse_plan(in.with(requests_for(in, asked).back()));
}

}  // namespace

// The engine for any order takes one stage for all units. Where it is not known what sending costs, none
// could be seen to be better for some of them.
Plan make_plan(const Profile& profile, const optim::Optimizer& optimizer, const Budget& budget,
               const PlanRequest& request, const MachineRates& rates) {
  if (request.stage && *request.stage > kMostStage)
    fail(ErrorCode::kInvalidArgument, "stage {} is asked for; there are stages 0 to {}", *request.stage,
         kMostStage);
  if (request.prefetch && (*request.prefetch == 0 || *request.prefetch > kMostPrefetch))
    fail(ErrorCode::kInvalidArgument, "a prefetch depth of {} is asked for; from 1 to {} is possible",
         *request.prefetch, kMostPrefetch);
  if (profile.micro_batches > kMostMicroBatches)
    fail(ErrorCode::kInvalidArgument,
         "a step of {} micro-batches of each rank is asked for; at most {} are possible, so give fewer that "
         "are larger",
         profile.micro_batches, kMostMicroBatches);
  if (budget.device > 0) return make_device_plan({profile, optimizer, budget, request, rates});
  PlanRequest at = request;
  if (request.ranks.size == 1) at.stage = 0;
  if (profile.whole_step) at.group = group_of_step(*profile.whole_step, request);
  const PlanInputs in{profile, optimizer, budget, at, rates};
  const bool is_given = at.stage || !at.stages.empty();
  std::optional<Plan> plan;
  if (is_given)
    plan = find_in_groups(in);
  else if (profile.any_order || !rates.link)
    plan = find_alike(in);
  else
    plan = StagesOfUnits(in).find();
  if (plan) return *plan;
  if (!is_given) at.stage = kMostStage;
  refuse_plan(in.with(at));
}

}  // namespace sluice::engine
