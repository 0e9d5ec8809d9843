#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/plan/plan.h"

namespace sluice::engine {

// Bytes that come from other ranks.
struct Arriving {
  std::uint64_t bytes = 0;  // that come to this rank
  // Bytes that pass the link: the same; or, of several hosts, all that come to this rank's host from others.
  std::uint64_t by_link = 0;
  std::uint64_t in_host = 0;  // of several hosts: about those that come from ranks of this rank's own
  Arriving& operator+=(const Arriving& more) {
    bytes += more.bytes;
    by_link += more.by_link;
    in_host += more.in_host;
    return *this;
  }
  Arriving operator*(std::uint64_t times) const { return {bytes * times, by_link * times, in_host * times}; }
};

// The update of a unit, or nothing. Bytes are those of the disk tier.
struct UpdateWork {
  double seconds = 0;                   // that all cores compute
  std::uint64_t read = 0, written = 0;  // streamed through staging, chunk by chunk
  std::size_t chunks = 0;
  Arriving gathered = {};  // bytes that other ranks have updated of the unit, and send then
  bool any() const { return seconds > 0 || read > 0 || written > 0; }
};

// The work of a step at one access of its schedule.
struct Visit {
  std::size_t unit = 0;       // the unit, whose updates are complete before it is accessed again
  bool frames = false;        // whether the access takes frames, which it has until all of it is done
  double compute = 0;         // seconds that all cores compute
  double layers = 0;          // seconds of them that wait for ranks which compute the micro-batch together
  std::size_t steps = 1;      // updates go on between so many steps of computing
  std::uint64_t fetched = 0;  // from disk into frames, before the access begins
  std::uint64_t written = 0;  // from its frames to disk, once they are not needed
  // Bytes that come from these ranks meanwhile; and those that come to this host from others.
  std::uint64_t received_while_computing = 0, from_hosts_while_computing = 0;
  Arriving pulled = {};       // from other ranks into frames, before the access begins
  Arriving summed = {};       // for sums over ranks of gradients that are final with the access
  bool sum_in_frames = true;  // whether the gradient takes frames until it is summed
  UpdateWork before, after;   // complete before the access begins; begun when it ends
  std::uint64_t read_bytes() const { return fetched + before.read + after.read; }
  Arriving arriving() const {
    Arriving all = pulled;
    return ((all += summed) += before.gathered) += after.gathered;
  }
  std::uint64_t written_bytes() const { return written + before.written + after.written; }
};

// How far transfers run ahead of computing.
struct Reach {
  std::size_t ahead = 1;  // how many accesses are fetched ahead
  // How many accesses have frames: a fetch begins when the access so many before has given back its own.
  std::size_t window = 2;
  std::size_t slots = 3;     // how many chunks of updates are under way
  bool sums_beside = false;  // whether a sum over ranks goes on beside the next access
};

// How long a step of these visits takes when it is repeated, as the engine runs it: one thing is computed at
// a time, the disk does what it is asked for in turn, an update's arithmetic falls between the steps of
// computing or into waiting, and frames come back when their contents are updated and written. Messages of
// ranks pass one link, in turn: that between hosts, where these are several. Bytes that ranks of a host hand
// on count after that, where the link between them is known.
StepTime walk(const std::vector<Visit>& visits, const Reach& reach, const MachineRates& rates);

// ---- on a GPU ----

// The work of a step on a GPU with one unit. The client uses it once forward, in order, and once backward, in
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
  // A collective of the unit: so many bytes leave the GPU for it, and so many return; and of a sum, so many
  // leave then to be kept.
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

// The seconds of what comes from other ranks over links; and of what comes to a GPU: as the link lets it
// come, or the one thread that copies it in host memory, whichever takes longer.
double over_links(const Arriving& arriving, const MachineRates& rates);
double seconds_of_ranks(const Arriving& arriving, const MachineRates& rates);

}  // namespace sluice::engine
