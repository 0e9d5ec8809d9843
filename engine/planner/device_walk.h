#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/planner/placement.h"

// Private to the plan.
namespace sluice::engine {

// What a step on a GPU does with one unit. The client uses it once forward, in order, and once backward, in
// the opposite order.
struct UnitOnGpu {
  struct Use {
    double compute = 0;           // seconds of the client's
    std::uint64_t fetched = 0;    // bytes that come to the GPU before
    std::uint64_t from_disk = 0;  // and of them from the disk
    double from_ranks = 0;        // seconds until they have come from other ranks
    std::size_t extents = 0;      // of frames that it takes
    std::uint64_t left = 0;       // bytes of its gradient that leave the GPU after it
    std::uint64_t to_disk = 0;    // and of them to the disk
  };
  Use forward, backward;
  // Its update, which streams so many bytes to the GPU and from it, and from the disk and to it.
  bool by_cpu = false;
  std::size_t elements = 0;  // 0: nothing is updated
  double update = 0;         // seconds of the processor that updates, for all chunks
  std::uint64_t in = 0, out = 0, read = 0, written = 0;
  bool streams() const { return in + out + read + written > 0; }
  // What all ranks do with it: so many bytes leave the GPU for that, and so many return; and of a sum, so
  // many leave then to be kept.
  struct Call {
    std::uint64_t out = 0, in = 0;
    double seconds = 0;
    std::uint64_t kept = 0;
    bool any() const { return out + in > 0 || seconds > 0; }
  };
  Call sum, gather;  // of its gradient before its update; of what each rank has updated
};

// How updates go on beside what the client computes.
struct GpuReach {
  std::size_t ahead = 1;     // how many accesses are fetched ahead
  std::size_t extents = 0;   // of all frames
  bool in_backward = false;  // an update follows its unit's backward, and not the step's end
  bool sums_beside = false;  // where it does not: a sum follows its unit's backward
  bool settles = false;      // a step ends when its updates have
  struct Pipeline {
    std::size_t chunk_elements = 1;
    std::size_t slots = 1;  // how many chunks are under way
  };
  Pipeline gpu, cpu, ranks;  // of updates, and of sums and gathers, which have as much each
};

// How long a step takes when it is repeated. In each direction one copy is under way at a time, slower while
// another one goes the other way; the disk, the GPU's updates, the CPU's, and what comes from other ranks do
// one thing at a time, too, beside what the client computes. A chunk of an update, a sum or a gather passes
// them one after the other, and others follow it as far as there are slots. A unit is not used before its
// update is complete and gathered, also in the next step; and its frames come back when what is in them has
// left, or is updated. Updates at the step's end wait for all sums.
double walk_on_gpu(const std::vector<UnitOnGpu>& units, const GpuReach& reach, const MachineRates& rates);

// A plan's step, for walk_on_gpu(), in which the client computes for so many seconds.
std::vector<UnitOnGpu> units_on_gpu(const Placement& placement, const Plan& plan, const MachineRates& rates,
                                    double computing);
GpuReach reach_on_gpu(const Placement& placement, const Plan& plan);
// Of what comes from other ranks: as the link lets it come, or the one thread that copies it in host memory,
// whichever takes longer.
double seconds_of_ranks(const Arriving& arriving, const MachineRates& rates);
// Of a unit's sum and gather, also where all threads of a rank read what the others have (RankMemory); and of
// a fetch.
struct SecondsOfRanks {
  SecondsOfRanks(const Placement& placement, UnitId unit, const UnitPlan& plan, const MachineRates& rates);
  double sum = 0, gather = 0, fetch = 0;
};
// Completes a plan for a GPU, of which what it has where is known: what a step moves, and Plan::device_time.
void predict_device_step(const Placement& placement, const MachineRates& rates,
                         std::optional<double> computing, Plan& plan);

}  // namespace sluice::engine
