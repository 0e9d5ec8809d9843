#pragma once
#include "engine/plan/plan.h"

namespace sluice::engine {

// make_plan() for a GPU, whose memory is budget.device: as much as fits is there, first what saves most
// copies for its bytes, and of the rest as much as fits in host memory. Its time is not predicted.
//
// The GPU updates what has its state there. Of the other units, whose state or whose gradients and parameters
// must be copied, so many are updated by the CPU that the copies of a step and the CPU's updates, which go on
// side by side, take as long as each other: those first that save most copies for the CPU's time, and none
// where that saves less than a tenth of them. Where MachineRates::gpu_link is not known, kAssumedGpuLink
// counts. What a GPU cannot update at all (Adafactor, Muon) is the CPU's.
inline constexpr double kAssumedGpuLink = 25e9;  // bytes a second each way: PCIe 4.0 with 16 lanes
Plan make_device_plan(const Profile& profile, const optim::Optimizer& optimizer, const Budget& budget,
                      const PlanRequest& request, const MachineRates& rates);

}  // namespace sluice::engine
