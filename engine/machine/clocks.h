#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "comm/communicator.h"

namespace sluice::engine {

// A rank's clock beside rank 0's, in nanoseconds.
struct ClockReading {
  std::int64_t time = 0;         // the rank's clock, when it was read
  std::int64_t ahead = 0;        // by how much it was ahead of rank 0's
  std::int64_t uncertainty = 0;  // what `ahead` is off by at most, whatever the links did
};

std::int64_t steady_nanoseconds();  // std::chrono::steady_clock, which is CLOCK_MONOTONIC

// Reads the clock of each rank in a dozen round trips from rank 0, of which the shortest counts (Cristian
// 1989): the clock was read between the beginning and the end of the trip, and counts as read in the middle.
// Collective, with the same result on all ranks: a reading of each. `clock` gives nanoseconds, does not
// descend, and is called on any thread. Throws as comm::Communicator::exchange().
std::vector<ClockReading> read_clocks(comm::Communicator& communicator,
                                      const std::function<std::int64_t()>& clock = steady_nanoseconds);

// What rank 0's clock showed when a rank's showed `time`: between two readings of the rank's clock it drifts
// evenly, and before and after them not at all. Does not descend with time.
std::int64_t time_of_first(const ClockReading& first, const ClockReading& last, std::int64_t time);

}  // namespace sluice::engine
