#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/plan/rates.h"

namespace sluice::engine {

// An update of a unit, or nothing. Bytes are those of the disk tier.
struct UpdateWork {
  double seconds = 0;                   // of all cores
  std::uint64_t read = 0, written = 0;  // streamed through staging, chunk by chunk
  std::size_t chunks = 0;
  bool any() const { return seconds > 0 || read > 0 || written > 0; }
};

// What a step does at one access of its schedule.
struct Visit {
  std::size_t unit = 0;       // whose updates are complete before it is accessed again
  bool frames = false;        // whether it takes any, which it then has until all of it is done
  double compute = 0;         // seconds of all cores
  std::size_t steps = 1;      // into which computing is cut: between them updates go on
  std::uint64_t fetched = 0;  // from disk into frames, before it begins
  std::uint64_t written = 0;  // out of its frames, once they are not needed
  UpdateWork before, after;   // that are complete before it begins; that begin when it ends
  std::uint64_t read_bytes() const { return fetched + before.read + after.read; }
  std::uint64_t written_bytes() const { return written + before.written + after.written; }
};

// How far transfers run ahead of computing.
struct Reach {
  std::size_t ahead = 1;   // accesses that are fetched for
  std::size_t window = 2;  // accesses whose frames there are: one begins to be fetched for when so many
                           // before it have given theirs back
  std::size_t slots = 3;   // chunks of updates that are under way
};

struct StepTime {
  double compute = 0, optimizer = 0, disk = 0;  // seconds, each alone
  double transfers = 0;                         // of all cores, for what the disk moves beside computing
  double step = 0;
  // Of what rounding leaves below 0 nothing is told.
  double wait() const { return std::max(0.0, step - compute - optimizer - transfers); }
};

// How long a step takes that repeats these visits, as the engine runs it: one thing is computed at a time,
// the disk does what it is asked for in turn, an update's arithmetic falls between the steps of what is
// computed or into waiting, and frames come back when what is in them is updated and written.
StepTime walk(const std::vector<Visit>& visits, const Reach& reach, const MachineRates& rates);

}  // namespace sluice::engine
