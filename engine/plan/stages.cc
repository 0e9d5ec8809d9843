#include "engine/plan/stages.h"

#include <optional>

#include "core/error.h"

namespace sluice::engine {

// Chooses the least stage with which everything is in memory, since more would have to be sent at a higher
// one; or else the highest stage, which needs the disk least.
Plan make_plan(const Profile& profile, const optim::Optimizer& optimizer, const Budget& budget,
               const PlanRequest& request, const MachineRates& rates) {
  if (request.stage && *request.stage > kMostStage)
    fail(ErrorCode::kInvalidArgument, "stage {} is asked for; there are stages 0 to {}", *request.stage,
         kMostStage);
  PlanRequest at = request;
  if (request.ranks.size == 1) at.stage = 0;
  if (at.stage) return make_plan_at_stage(profile, optimizer, budget, at, rates);
  std::optional<Plan> on_disk;
  for (at.stage = 0; *at.stage < kMostStage; ++*at.stage) {
    try {
      const Plan plan = make_plan_at_stage(profile, optimizer, budget, at, rates);
      if (!plan.uses_disk()) return plan;
      on_disk = plan;
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kBudget) throw;
    }
  }
  try {
    return make_plan_at_stage(profile, optimizer, budget, at, rates);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kBudget || !on_disk) throw;
    return *on_disk;
  }
}

}  // namespace sluice::engine
