#pragma once
#include "engine/machine/machine.h"
#include "models/run/trainer.h"

namespace sluice::models {

// Returns what plan_training() would return on another machine, which a file describes. Memory, threads and
// disks that the settings leave open are the rank's share of the described ones, and so are rates. Folders of
// settings.disk are names of its disks, of which any size may be asked. Data and outputs are not looked at.
// PlanResult::not_known has what the description lacks. Throws what plan_training() does, and
// Error(kInvalidArgument) for an unknown disk.
PlanResult plan_for_machine(const TrainSettings& settings, const engine::Machine& machine);

}  // namespace sluice::models
