#pragma once
#include <algorithm>
#include <array>
#include <chrono>

namespace sluice::engine {

// Runs the work five times and returns the seconds of each run, sorted, above 0; the first run also warms up.
template <class Work>
std::array<double, 5> sorted_seconds(const Work& work) {
  using Clock = std::chrono::steady_clock;
  std::array<double, 5> seconds;
  for (double& round : seconds) {
    const Clock::time_point begin = Clock::now();
    work();
    round = std::max(std::chrono::duration<double>(Clock::now() - begin).count(), 1e-9);
  }
  std::ranges::sort(seconds);
  return seconds;
}

// The seconds of the quickest of five runs: what the machine can do at most.
template <class Work>
double best_seconds(const Work& work) {
  return sorted_seconds(work).front();
}

// The middle of the seconds of five runs: what a step will find.
template <class Work>
double middle_seconds(const Work& work) {
  return sorted_seconds(work)[2];
}

}  // namespace sluice::engine
