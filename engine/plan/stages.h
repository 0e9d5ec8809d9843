#pragma once
#include "engine/plan/plan.h"

// Private to the plan.
namespace sluice::engine {

// Makes the plan that is fastest at request.stage. Throws what make_plan() does. REQUIRES: the stage is
// given.
Plan make_plan_at_stage(const Profile& profile, const optim::Optimizer& optimizer, const Budget& budget,
                        const PlanRequest& request, const MachineRates& rates);

}  // namespace sluice::engine
