#pragma once
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "engine/planner/device_walk.h"
#include "engine/planner/placement.h"

// Private to the plan.
namespace sluice::engine {

// What of units' steps goes on beside everything else, where a GPU computes: the client's computing, and all
// other units.
struct Beside {
  Placement::Traffic copied;
  double gpu = 0, cpu = 0;  // seconds of updates
  double ranks = 0;         // and of what comes from other ranks
  Beside() = default;
  Beside(const Placement& placement, const MachineRates& rates, UnitId unit, const UnitPlan& plan)
      : copied(placement.link_traffic(unit, plan)) {
    const SecondsOfRanks of_ranks(placement, unit, plan, rates);
    ranks = of_ranks.sum + of_ranks.gather +
            static_cast<double>(placement.fetches(unit) * placement.micro_batches()) * of_ranks.fetch;
    if (plan.updated_by_cpu())
      cpu = placement.update_seconds(unit, rates);
    else
      gpu = placement.gpu_update_seconds(unit, rates.gpu);
  }
  void add(const Beside& more) {
    copied.read += more.copied.read;
    copied.written += more.copied.written;
    gpu += more.gpu;
    cpu += more.cpu;
    ranks += more.ranks;
  }
  double copying(const MachineRates& rates) const {
    return copy_seconds(copied.read, copied.written, rates.gpu);
  }
  double updating() const { return gpu + cpu; }
};

// Which processor updates each unit of a plan by which the GPU updates all of them, and why. The plan has the
// slots of both. computing: PlanRequest::computing.
std::pair<std::vector<allocator::Tier>, std::string> share_updates(const Placement& placement,
                                                                   const MachineRates& rates,
                                                                   const Plan& by_gpu, double computing);

}  // namespace sluice::engine
