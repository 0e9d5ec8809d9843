#include "allocator/extent_map.h"

#include <algorithm>

#include "core/error.h"

namespace sluice::allocator {

std::vector<ExtentRun> ExtentMap::free_runs() const {
  std::vector<ExtentRun> runs;
  for (std::size_t i = 0; i < used_.size(); ++i) {
    if (used_[i]) continue;
    if (runs.empty() || runs.back().first + runs.back().count != i) runs.push_back({i, 0});
    ++runs.back().count;
  }
  return runs;
}

void ExtentMap::mark(ExtentRun run, bool used) {
  for (std::size_t i = run.first; i < run.first + run.count; ++i) {
    ensure(used_[i] != used, "extent {} of a frame pool was {} twice", i, used ? "taken" : "given back");
    used_[i] = used;
  }
  free_ = used ? free_ - run.count : free_ + run.count;
}

std::vector<ExtentRun> ExtentMap::take(std::size_t count) {
  std::vector<ExtentRun> runs = free_runs();
  std::stable_sort(runs.begin(), runs.end(), [](ExtentRun a, ExtentRun b) { return a.count > b.count; });
  std::vector<ExtentRun> taken;
  for (auto longest = runs.begin(); count > 0; ++longest) {
    ExtentRun run = *longest;
    if (run.count > count) {
      const auto too_short =
          std::partition_point(longest, runs.end(), [&](ExtentRun other) { return other.count >= count; });
      run = {std::prev(too_short)->first, count};
    }
    taken.push_back(run);
    mark(run, true);
    count -= run.count;
  }
  return taken;
}

void ExtentMap::give_back(ExtentRun run) { mark(run, false); }

}  // namespace sluice::allocator
