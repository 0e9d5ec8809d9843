#pragma once
#include <algorithm>
#include <array>
#include <chrono>

namespace sluice::models {

// The seconds of five rounds, sorted, above 0; the first is also the warming up.
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

// For what a machine can do at most.
template <class Work>
double best_seconds(const Work& work) {
  return sorted_seconds(work).front();
}

// For what a step will find.
template <class Work>
double middle_seconds(const Work& work) {
  return sorted_seconds(work)[2];
}

}  // namespace sluice::models
