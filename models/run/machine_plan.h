#pragma once
#include "engine/machine/machine.h"
#include "models/run/trainer.h"

namespace sluice::models {

// What plan_training() says, of another machine, at which nobody looks: memory, threads and disks that are
// not stated are the machine's, folders of settings.disk are names of its disks, of which any size may be
// asked, and data and output are not looked at. What the machine does not say is in PlanResult::not_known.
// Throws as plan_training, and Error(kInvalidArgument) for a disk that the machine does not have.
PlanResult plan_for_machine(const TrainSettings& settings, const engine::Machine& machine);

}  // namespace sluice::models
