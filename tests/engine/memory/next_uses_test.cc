#include "engine/memory/next_uses.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

namespace sluice::engine {
namespace next_uses_test {

using Time = NextUses::Time;

NextUses uses_of(std::size_t holdings, std::vector<std::vector<HoldingId>> schedule) {
  NextUses uses;
  for (HoldingId id = 0; id < holdings; ++id) uses.add(id);
  uses.set_schedule(std::move(schedule));
  return uses;
}

void go_to(NextUses& uses, std::size_t position) {
  uses.set_position(position, [](HoldingId) {});
}

TEST(NextUses, CountAccessesAroundTheCycle) {
  NextUses uses = uses_of(4, {{0}, {1, 2}, {0}});
  EXPECT_EQ(uses.distance(0), 0u) << "the access at the position counts";
  EXPECT_EQ(uses.distance(1), 1u);
  EXPECT_EQ(uses.distance(3), NextUses::kNever);
  go_to(uses, 2);
  EXPECT_EQ(uses.distance(0), 0u);
  EXPECT_EQ(uses.distance(2), 2u);
  go_to(uses, 0);
  EXPECT_EQ(uses.distance(2), 1u);
}

TEST(NextUses, WhatFollowsAnotherIsNeededWithItOnceItsOwnUsesAreOver) {
  NextUses uses = uses_of(2, {{0}, {0}, {0}, {1}});
  uses.follow(1, 0);
  EXPECT_EQ(uses.distance(1), 3u);
  uses.set_parked(1, true);
  EXPECT_EQ(uses.distance(1), 0u);
  go_to(uses, 3);
  EXPECT_EQ(uses.distance(1), 1u);
  uses.set_parked(1, false);
  EXPECT_EQ(uses.distance(1), 0u);
}

// All times that changed are reported: compares every distance with one computed from the schedule alone.
TEST(NextUses, TellWhoseTimeIsAnother) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    const std::size_t holdings = 1 + random() % 8, length = 1 + random() % 12;
    std::vector<std::vector<HoldingId>> schedule(length);
    for (auto& access : schedule)
      for (HoldingId id = 0; id < holdings; ++id)
        if (random() % 4 == 0) access.push_back(id);
    NextUses uses = uses_of(holdings, schedule);
    for (int move = 0; move < 20; ++move) {
      std::vector<Time> before;
      for (HoldingId id = 0; id < holdings; ++id) before.push_back(uses.time(id));
      std::set<HoldingId> told;
      const std::size_t position = random() % length;
      uses.set_position(position, [&](HoldingId id) { told.insert(id); });
      for (HoldingId id = 0; id < holdings; ++id) {
        Time expected = NextUses::kNever;
        for (std::size_t i = length; i-- > 0;) {
          const auto& access = schedule[(position + i) % length];
          if (std::ranges::count(access, id) > 0) expected = i;
        }
        EXPECT_EQ(uses.distance(id), expected);
        if (told.contains(id)) continue;
        EXPECT_EQ(uses.time(id), before[id]);
      }
    }
  }
}

TEST(NextUses, ThoseOfTheNextAccessesAreNamedWithWhatFollowsThem) {
  NextUses uses = uses_of(4, {{0}, {1}, {2}});
  uses.follow(3, 0);
  go_to(uses, 2);
  std::vector<HoldingId> named;
  uses.for_each_within(2, [&](HoldingId id) { named.push_back(id); });
  EXPECT_THAT(named, testing::ElementsAre(2, 0, 3));
  named.clear();
  uses.for_each_within(100, [&](HoldingId id) { named.push_back(id); });
  EXPECT_EQ(named.size(), 4u) << "once around the cycle";
}

}  // namespace next_uses_test
}  // namespace sluice::engine
