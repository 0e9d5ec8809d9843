#pragma once
#include <algorithm>
#include <array>
#include <chrono>

namespace sluice::engine {

// The seconds that the work takes, above 0.
template <class Work>
double seconds_of(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::max(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(), 1e-9);
}

// Runs the work five times and returns the seconds of each run, sorted; the first run also warms up.
template <class Work>
std::array<double, 5> sorted_seconds(const Work& work) {
  std::array<double, 5> seconds;
  for (double& round : seconds) round = seconds_of(work);
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
