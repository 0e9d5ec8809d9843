#include "comm/given.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace sluice::comm {
namespace {

// Returns the number of elements of the runs before this one.
std::size_t count_before(const Runs& runs, std::size_t element) {
  if (element <= runs.first || runs.count == 0) return 0;
  if (runs.count == 1) return std::min(runs.size, element - runs.first);
  const std::size_t whole = (element - runs.first) / runs.stride, rest = (element - runs.first) % runs.stride;
  return whole >= runs.count ? runs.count * runs.size : whole * runs.size + std::min(runs.size, rest);
}

void add_within(const Runs& runs, const Run& elements, std::vector<Run>& found) {
  const std::size_t skipped =
      runs.count > 1 && elements.begin > runs.first ? (elements.begin - runs.first) / runs.stride : 0;
  for (std::size_t i = skipped; i < runs.count; ++i) {
    const std::size_t begin = runs.first + i * runs.stride;
    if (begin >= elements.end) return;
    const Run run{std::max(begin, elements.begin), std::min(begin + runs.size, elements.end)};
    if (run.begin < run.end) found.push_back({run.begin - elements.begin, run.end - elements.begin});
  }
}

}  // namespace

std::vector<Run> Given::within(int rank, Run elements) const {
  std::vector<Run> found;
  for (const Runs& runs : by_rank_[static_cast<std::size_t>(rank)]) add_within(runs, elements, found);
  std::ranges::sort(found, {}, &Run::begin);
  std::vector<Run> joined;
  for (const Run& run : found)
    if (!joined.empty() && joined.back().end == run.begin)
      joined.back().end = run.end;
    else
      joined.push_back(run);
  return joined;
}

std::size_t Given::count(int rank, Run elements) const {
  std::size_t count = 0;
  for (const Runs& runs : by_rank_[static_cast<std::size_t>(rank)])
    count += count_before(runs, elements.end) - count_before(runs, elements.begin);
  return count;
}

void move_together(std::span<const Run> runs, std::size_t element_bytes, std::byte* array) {
  std::size_t at = 0;
  for (const Run& run : runs) {
    if (at != run.begin)
      std::memmove(array + at * element_bytes, array + run.begin * element_bytes, run.size() * element_bytes);
    at += run.size();
  }
}

void for_each_run(std::span<const RunsOfArray> arrays, std::size_t element_bytes, const TakeRun& take) {
  struct Place {
    std::size_t run = 0, before = 0;  // the next run, and the number of elements in earlier runs
  };
  std::vector<Place> places(arrays.size());
  std::vector<const std::byte*> have(arrays.size());
  for (std::size_t at = 0;;) {
    std::size_t end = SIZE_MAX;
    bool any = false;
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      const auto& [data, runs, in_place] = arrays[i];
      auto& [next, before] = places[i];
      if (next < runs.size() && runs[next].end == at) before += runs[next++].size();
      have[i] = nullptr;
      if (next == runs.size()) continue;
      const Run& run = runs[next];
      end = std::min(end, run.begin > at ? run.begin : run.end);
      if (run.begin > at) continue;
      have[i] = data + (in_place ? at : before + at - run.begin) * element_bytes;
      any = true;
    }
    if (end == SIZE_MAX) return;
    if (any) take({at, end}, have);
    at = end;
  }
}

}  // namespace sluice::comm
