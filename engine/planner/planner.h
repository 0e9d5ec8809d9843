#pragma once
#include "core/bytes.h"
#include "engine/plan/plan.h"

namespace sluice::engine {

// The largest extents of frames that a plan for a GPU has. Mapping may hold up the whole GPU, and the larger
// they are, the fewer calls map them.
inline constexpr std::size_t kLargestExtentBytes = 32 * kMiB;

// Makes the plan that is fastest at these rates among those that fit; for a GPU, whose memory is
// budget.device, the one that has most there of what saves most. It is a pure function. Throws
// Error(kBudget), which says which budget is short, by how much, and the cheapest change that fits;
// Error(kInvalidArgument) for a request that the profile does not allow.
Plan make_plan(const Profile& profile, const optim::Optimizer& optimizer, const Budget& budget,
               const PlanRequest& request, const MachineRates& rates);

// How long each unit takes for a micro-batch at these rates, where nothing is sent, and only what the request
// says is computed again.
std::vector<SectionSeconds> seconds_of_units(const Profile& profile, const optim::Optimizer& optimizer,
                                             const PlanRequest& request, const MachineRates& rates);

// Of a plan for a GPU that was made by these rates: finds how long a step takes in which the client computes
// for so many seconds.
void state_computing(const Profile& profile, const optim::Optimizer& optimizer, const MachineRates& rates,
                     double computing, Plan& plan);

}  // namespace sluice::engine
