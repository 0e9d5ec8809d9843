#pragma once
#include <string>
#include <utility>
#include <vector>

#include "engine/planner/placement.h"

// Private to the plan.
namespace sluice::engine {

// Which processor updates each unit of a plan by which the GPU updates all of them, and why. The plan has the
// slots of both. computing: PlanRequest::computing.
std::pair<std::vector<allocator::Tier>, std::string> share_updates(const Placement& placement,
                                                                   const MachineRates& rates,
                                                                   const Plan& by_gpu, double computing);

}  // namespace sluice::engine
