#include "engine/memory/frame_assignment.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

namespace sluice::engine {
namespace frame_assignment_test {

using Schedule = std::vector<std::vector<HoldingId>>;
using Frames = std::vector<std::vector<std::size_t>>;

Schedule forwards_and_backwards(HoldingId count) {
  Schedule schedule;
  for (HoldingId id = 0; id < count; ++id) schedule.push_back({id});
  for (HoldingId id = count; id > 0; --id) schedule.push_back({id - 1});
  return schedule;
}

bool share(const std::vector<std::size_t>& one, const std::vector<std::size_t>& other) {
  return std::ranges::find_first_of(one, other) != one.end();
}

// How many accesses lie between the uses of the two that are nearest, around the cycle.
std::size_t distance(const Schedule& schedule, HoldingId one, HoldingId other) {
  const auto names = [&](std::size_t at, HoldingId id) {
    return std::ranges::find(schedule[at], id) != schedule[at].end();
  };
  std::size_t nearest = SIZE_MAX;
  for (std::size_t i = 0; i < schedule.size(); ++i)
    for (std::size_t j = 0; j < schedule.size(); ++j) {
      const std::size_t apart = i < j ? j - i : i - j;
      if (names(i, one) && names(j, other)) nearest = std::min({nearest, apart, schedule.size() - apart});
    }
  return nearest;
}

// Whether the frames have room for all that is used at most so far from the holding.
bool fits(const Schedule& schedule, const std::vector<std::size_t>& extents, std::size_t frames,
          HoldingId holding, std::size_t far) {
  std::size_t sum = 0;
  for (HoldingId id = 0; id < extents.size(); ++id)
    if (distance(schedule, holding, id) <= far) sum += extents[id];
  return sum <= frames;
}

TEST(AssignFrames, AsManyInARowAsFitShareNone) {
  constexpr HoldingId kCount = 30;
  const Frames frames =
      assign_frames(forwards_and_backwards(kCount), {}, std::vector<std::size_t>(kCount, 3), 14);
  for (HoldingId one = 0; one < kCount; ++one)
    for (HoldingId other = one + 1; other < kCount && other < one + 4; ++other)
      EXPECT_FALSE(share(frames[one], frames[other])) << one << ' ' << other;
}

TEST(AssignFrames, WhatIsNotNamedOrTakesMoreThanThereAreGetsNone) {
  const Frames frames = assign_frames({{0, 2}, {3}}, {}, {1, 1, 5, 0}, 4);
  EXPECT_EQ(frames, (Frames{{0}, {}, {}, {}}));
  EXPECT_EQ(assign_frames({}, {}, {1, 1}, 4), (Frames{{}, {}}));
}

TEST(AssignFrames, WhatIsHeldAllTheWhileSharesNone) {
  constexpr HoldingId kCount = 20;
  Schedule schedule = forwards_and_backwards(kCount), held(schedule.size());
  for (std::size_t at = 1; at < 2 * kCount - 1; ++at) held[at] = {0};
  const Frames frames = assign_frames(schedule, held, std::vector<std::size_t>(kCount, 2), 12);
  for (HoldingId id = 1; id < kCount; ++id) {
    EXPECT_EQ(frames[id].size(), 2);
    EXPECT_FALSE(share(frames[0], frames[id])) << id;
  }
}

TEST(AssignFrames, SharesOnlyWhereNeighboursDoNotFit) {
  std::mt19937_64 random(1);
  int together = 0;
  for (int round = 0; round < 60; ++round) {
    const HoldingId count = 4 + random() % 12;
    const std::size_t frames = 6 + random() % 20;
    std::vector<std::size_t> extents(count);
    for (std::size_t& each : extents) each = 1 + random() % 4;
    Schedule schedule(8 + random() % 24);
    for (auto& access : schedule)
      for (std::size_t i = 0; i <= random() % 2; ++i)
        access.push_back(static_cast<HoldingId>(random() % count));
    const Frames assigned = assign_frames(schedule, {}, extents, frames);
    EXPECT_EQ(assigned, assign_frames(schedule, {}, extents, frames));
    for (HoldingId one = 0; one < count; ++one) {
      const bool is_named = distance(schedule, one, one) == 0;
      EXPECT_EQ(assigned[one].size(), is_named ? extents[one] : 0);
      const std::set<std::size_t> numbers(assigned[one].begin(), assigned[one].end());
      EXPECT_EQ(numbers.size(), assigned[one].size());
      EXPECT_TRUE(numbers.empty() || *numbers.rbegin() < frames);
      for (HoldingId other = 0; other < one; ++other) {
        const std::size_t far = distance(schedule, one, other);
        if (far == SIZE_MAX || !fits(schedule, extents, frames, one, far) ||
            !fits(schedule, extents, frames, other, far))
          continue;
        ++together;
        EXPECT_FALSE(share(assigned[one], assigned[other])) << round << ' ' << one << ' ' << other;
      }
    }
  }
  EXPECT_GT(together, 200);
}

}  // namespace frame_assignment_test
}  // namespace sluice::engine
