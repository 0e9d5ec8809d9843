#include "engine/plan/stages.h"

#include "engine/plan/device_plan.h"

#include <cmath>
#include <optional>
#include <set>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::engine {
namespace {

// How many sums of gradients are kept depends on the group where they are added pairwise.
Plan make_plan_in_groups(const Profile& profile, const optim::Optimizer& optimizer, const Budget& budget,
                         const PlanRequest& request, const MachineRates& rates) {
  if (!request.reproducible || request.group)
    return make_plan_at_stage(profile, optimizer, budget, request, rates);
  std::optional<Plan> best;
  PlanRequest at = request;
  for (const std::size_t group : group_sizes_of(profile.micro_batches)) {
    at.group = group;
    try {
      const Plan plan = make_plan_at_stage(profile, optimizer, budget, at, rates);
      if (!best || faster(plan, *best)) best = plan;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kBudget || (group == 1 && !best)) throw;
    }
  }
  return *best;
}

}  // namespace

bool faster(const Plan& a, const Plan& b) {
  if (std::abs(a.time.step - b.time.step) > kSame * b.time.step) return a.time.step < b.time.step;
  const auto traffic = [](const Plan& p) {
    return static_cast<double>(p.step_bytes_read + p.step_bytes_written + p.step_bytes_received);
  };
  if (std::abs(traffic(a) - traffic(b)) > 0.05 * traffic(b)) return traffic(a) < traffic(b);
  if (a.uses_disk() && a.prefetch != b.prefetch) return a.prefetch > b.prefetch;
  if (a.staging_slots != b.staging_slots) return a.staging_slots > b.staging_slots;
  return a.peak_memory < b.peak_memory;
}

std::vector<std::size_t> group_sizes_of(std::size_t micro_batches) {
  std::set<std::size_t> sizes;
  for (std::size_t groups = 1; groups <= micro_batches; ++groups)
    sizes.insert(divide_up(micro_batches, groups));
  return {sizes.rbegin(), sizes.rend()};
}

// Chooses the least stage with which everything is in memory, since more would have to be sent at a higher
// one. Where there is none, the fastest stage; or the highest, which needs the disk least, where it is not
// known what sending costs.
Plan make_plan(const Profile& profile, const optim::Optimizer& optimizer, const Budget& budget,
               const PlanRequest& request, const MachineRates& rates) {
  if (request.stage && *request.stage > kMostStage)
    fail(ErrorCode::kInvalidArgument, "stage {} is asked for; there are stages 0 to {}", *request.stage,
         kMostStage);
  if (budget.device > 0) return make_device_plan(profile, optimizer, budget, request, rates);
  PlanRequest at = request;
  if (request.ranks.size == 1) at.stage = 0;
  if (at.stage) return make_plan_in_groups(profile, optimizer, budget, at, rates);
  std::optional<Plan> best;
  for (at.stage = 0; *at.stage <= kMostStage; ++*at.stage) {
    try {
      const Plan plan = make_plan_in_groups(profile, optimizer, budget, at, rates);
      if (!plan.uses_disk() && *at.stage < kMostStage) return plan;
      if (!best || !rates.link || faster(plan, *best)) best = plan;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kBudget || (*at.stage == kMostStage && !best)) throw;
    }
  }
  return *best;
}

}  // namespace sluice::engine
