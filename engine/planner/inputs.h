#pragma once
#include "engine/plan/plan.h"

// Private to the plan.
namespace sluice::engine {

// The arguments of make_plan(). All of them outlive the planner.
struct PlanInputs {
  const Profile& profile;
  const optim::Optimizer& optimizer;
  const Budget& budget;
  const PlanRequest& request;
  const MachineRates& rates;
  PlanInputs with(const PlanRequest& other) const { return {profile, optimizer, budget, other, rates}; }
};

}  // namespace sluice::engine
