#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "comm/communicator.h"

namespace sluice::engine {

// A rank's clock compared with rank 0's, in nanoseconds.
struct ClockReading {
  std::int64_t time = 0;         // the rank's clock at the reading
  std::int64_t ahead = 0;        // how far it was ahead of rank 0's
  std::int64_t uncertainty = 0;  // the largest error of `ahead`, whatever the links did
};

std::int64_t steady_nanoseconds();  // std::chrono::steady_clock, which is CLOCK_MONOTONIC

// Reads the clock of each rank in a dozen round trips from rank 0, of which the shortest counts (Cristian
// 1989): the clock was read between the beginning and the end of the trip, and counts as read in the middle.
// Collective, with the same result on all ranks: a reading of each. `clock` returns nanoseconds, is
// monotonic, and is called on any thread. Throws as comm::Communicator::exchange().
std::vector<ClockReading> read_clocks(comm::Communicator& communicator,
                                      const std::function<std::int64_t()>& clock = steady_nanoseconds);

// Rank 0's clock when a rank's showed `time`: between two readings the rank's clock drifts evenly, and before
// and after them not at all. Monotonic in `time`.
std::int64_t time_of_first(const ClockReading& first, const ClockReading& last, std::int64_t time);

}  // namespace sluice::engine
