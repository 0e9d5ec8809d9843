#pragma once
#include "engine/machine/machine.h"
#include "models/run/trainer.h"

namespace sluice::models {

// Plans as plan_training() would on another machine, which a file describes. Memory, threads, disks and rates
// that the settings leave open are the rank's share of the described ones. The folders of settings.disk name
// described disks, and any size of them may be requested. Data and outputs are ignored. PlanResult::not_known
// lists what the description lacks. Throws as plan_training(), and Error(kInvalidArgument) for an unknown
// disk.
PlanResult plan_for_machine(const TrainSettings& settings, const engine::Machine& machine);

}  // namespace sluice::models
