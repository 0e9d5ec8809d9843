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

// Whether the GPU is to update: so it is also where the optimizer's state is asked to be in its memory.
inline bool asks_for_updates_by_gpu(const PlanRequest& request) {
  constexpr auto kDevice = allocator::Tier::kDevice;
  return request.updates == kDevice || request.place(Part::kState) == kDevice;
}

}  // namespace sluice::engine
