#pragma once
#include <algorithm>
#include <chrono>

namespace sluice::models {

// Of three rounds the quickest one's seconds, above 0; the first is also the warming up.
template <class Work>
double best_seconds(const Work& work) {
  using Clock = std::chrono::steady_clock;
  double best = 1e9;
  for (int round = 0; round < 3; ++round) {
    const Clock::time_point begin = Clock::now();
    work();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - begin).count());
  }
  return std::max(best, 1e-9);
}

}  // namespace sluice::models
