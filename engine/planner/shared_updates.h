#pragma once
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/planner/placement.h"

// Private to the plan.
namespace sluice::engine {

// Which processor updates each unit, and why.
struct SharedUpdates {
  std::vector<allocator::Tier> updated_on;
  std::string because;
};

// Of a plan by which the GPU updates all units: whether it is possible, and the seconds of its step.
struct ByGpuAlone {
  const Plan& plan;
  bool fits = false;
  double seconds = 0;
};

// Makes a plan in which these processors update the units. Returns the seconds of its step; nothing where it
// is not possible.
using PlannedSeconds = std::function<std::optional<double>(const std::vector<allocator::Tier>& updated_on)>;

// Lets the CPU update the units with which a step takes least. Returns nothing where no plan is possible in
// which it updates any. computing: PlanRequest::computing.
std::optional<SharedUpdates> share_updates(const Placement& placement, const MachineRates& rates,
                                           const ByGpuAlone& by_gpu, double computing,
                                           const PlannedSeconds& planned);

}  // namespace sluice::engine
