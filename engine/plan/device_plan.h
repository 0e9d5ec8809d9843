#pragma once
#include "engine/plan/plan.h"

namespace sluice::engine {

// make_plan() for a GPU, whose memory is budget.device: as much as fits is there, first what saves most
// copies for its bytes, and of the rest as
// much as fits in host memory. Its time is not predicted.
Plan make_device_plan(const Profile& profile, const optim::Optimizer& optimizer, const Budget& budget,
                      const PlanRequest& request, const MachineRates& rates);

}  // namespace sluice::engine
