#pragma once
#include "core/bytes.h"
#include "engine/planner/inputs.h"

namespace sluice::engine {

// The largest extents of frames that a plan for a GPU has. Mapping may hold up the whole GPU, and the larger
// they are, the fewer calls map them.
inline constexpr std::size_t kLargestExtentBytes = 32 * kMiB;

// make_plan() for a GPU, whose memory is budget.device: as much as fits is there, first what saves most
// seconds for its bytes, and of the rest as much as fits in host memory. Where the rest fits there as a whole
// the disk is not used, also if it is given; more memory never makes a plan use it. Where all of the model
// fits on the GPU, all of it is there. Throws Error(kBudget) where nothing fits, with alternatives of which
// each is enough.
//
// The GPU updates what has its state there. Of the other units, whose state or whose gradients and parameters
// must be copied, so many are updated by the CPU that a step takes least (walk_on_gpu()): those first that
// save most copies for the CPU's time, evenly over those that save as much, and none where that saves less
// than a tenth of what the step takes beyond computing. What a GPU cannot update at all (Adafactor, Muon) is
// the CPU's.
//
// Extents of frames are the largest up to kLargestExtentBytes with which everything that is on the GPU with
// the smallest ones still fits in the budget, and which waste little.
Plan make_device_plan(const PlanInputs& in);

}  // namespace sluice::engine
