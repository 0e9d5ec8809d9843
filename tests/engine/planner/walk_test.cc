#include "engine/planner/walk.h"
#include "testing.h"

namespace sluice::engine::walk_test {

// Rates at which 100 bytes take a second in each direction.
MachineRates slow_disk() {
  MachineRates rates;
  rates.disk_read = rates.disk_write = 100;
  return rates;
}

Visit computed(double seconds, std::uint64_t fetched = 0) {
  Visit visit;
  visit.compute = seconds;
  visit.steps = 10;
  visit.fetched = fetched;
  return visit;
}

// Makes visits of one unit each, which take frames.
std::vector<Visit> in_frames(std::size_t count, const Visit& like) {
  std::vector<Visit> visits(count, like);
  for (std::size_t i = 0; i < count; ++i) {
    visits[i].unit = i;
    visits[i].frames = true;
  }
  return visits;
}

constexpr Reach kFar{2, 8, 10}, kNear{1, 2, 10};

TEST(Walk, WithNothingOnDiskIsAllThatIsComputed) {
  std::vector<Visit> visits = {computed(1), computed(2)};
  visits[1].unit = 1;
  visits[0].before.seconds = 0.25;
  visits[1].after.seconds = 0.5;
  const StepTime time = walk(visits, kNear, {});
  EXPECT_DOUBLE_EQ(time.step, 3.75);
  EXPECT_DOUBLE_EQ(time.compute, 3);
  EXPECT_DOUBLE_EQ(time.optimizer, 0.75);
  EXPECT_DOUBLE_EQ(time.wait(), 0);
  EXPECT_EQ(walk({}, kNear, {}).step, 0);
}

TEST(Walk, ComputingHidesWhatIsFetchedMeanwhile) {
  EXPECT_DOUBLE_EQ(walk(in_frames(6, computed(1, 50)), kFar, slow_disk()).step, 6);
  EXPECT_DOUBLE_EQ(walk(in_frames(6, computed(1, 150)), kFar, slow_disk()).step, 9);
}

// Rates at which ranks receive 100 bytes in a second.
MachineRates slow_link() {
  MachineRates rates;
  rates.link = Link{100, 0};
  return rates;
}

TEST(Walk, SumsGoOnBesideTheNextAccess) {
  std::vector<Visit> visits = in_frames(6, computed(1));
  for (Visit& visit : visits) visit.summed = {50, 50};
  Reach beside = kFar;
  beside.sums_beside = true;
  EXPECT_DOUBLE_EQ(walk(visits, beside, slow_link()).step, 6.5);  // nothing hides the last one
  EXPECT_DOUBLE_EQ(walk(visits, kFar, slow_link()).step, 9);
  EXPECT_DOUBLE_EQ(walk(visits, beside, slow_link()).link, 3);
  EXPECT_DOUBLE_EQ(walk(visits, beside, {}).step, 6);
  for (Visit& visit : visits) visit.summed = {200, 200};
  EXPECT_DOUBLE_EQ(walk(visits, beside, slow_link()).step, 13);
}

TEST(Walk, SumsOfWhatIsInMemoryAreWaitedForAtTheEndAlone) {
  std::vector<Visit> visits = in_frames(6, computed(1));
  visits[1].summed = {300, 300};  // begins after 2 s
  EXPECT_DOUBLE_EQ(walk(visits, kFar, slow_link()).step, 9);
  visits[1].sum_in_frames = false;
  EXPECT_DOUBLE_EQ(walk(visits, kFar, slow_link()).step, 6);
  visits[4].summed = visits[5].summed = {300, 300};  // the link is busy from 5 s on
  visits[5].sum_in_frames = false;
  EXPECT_DOUBLE_EQ(walk(visits, kFar, slow_link()).step, 12);  // the first of them is in frames
  visits[4].sum_in_frames = false;
  EXPECT_DOUBLE_EQ(walk(visits, kFar, slow_link()).step, 11);
}

TEST(Walk, WhatOthersHaveUpdatedComesBeforeTheNextAccess) {
  std::vector<Visit> visits = in_frames(2, computed(1));
  visits[0].after.seconds = 0.5;
  visits[0].after.gathered = {300, 300};
  // The update ends within the second access, after 2.5 s, and what is gathered comes 3 s later.
  EXPECT_DOUBLE_EQ(walk(visits, kFar, slow_link()).step, 5.5);
}

// The walk tells work that a step does once apart from its passes.
TEST(Walk, TellsUpdatesAndSumsApart) {
  std::vector<Visit> visits = in_frames(4, computed(1));
  visits[0].before.seconds = 0.5;
  visits[3].after.seconds = 0.25;
  visits[3].summed = {50, 50};
  const StepTime time = walk(visits, kFar, slow_link());
  EXPECT_DOUBLE_EQ(time.updates, 0.75);
  EXPECT_DOUBLE_EQ(time.sums, 0.5);
  EXPECT_DOUBLE_EQ(time.passes(), 4);
  EXPECT_DOUBLE_EQ(time.step, 5.25);
}

TEST(Walk, WhatAHostHandsOnPassesItsOwnLink) {
  std::vector<Visit> visits = in_frames(4, computed(1));
  visits[3].summed = {150, 50, 100};
  MachineRates rates = slow_link();
  EXPECT_DOUBLE_EQ(walk(visits, kFar, rates).sums, 0.5);  // within a host it takes no time
  rates.host_link = Link{200, 0.25};
  EXPECT_DOUBLE_EQ(walk(visits, kFar, rates).sums, 0.5 + 0.75);
  EXPECT_DOUBLE_EQ(walk(visits, kFar, rates).link, 0.5 + 0.75);
}

TEST(Walk, ComputingHidesWhatIsPulledMeanwhile) {
  std::vector<Visit> visits = in_frames(6, computed(1));
  for (Visit& visit : visits) visit.pulled = {50, 50};
  EXPECT_DOUBLE_EQ(walk(visits, kFar, slow_link()).step, 6);
  for (Visit& visit : visits) visit.pulled = {150, 150};
  EXPECT_DOUBLE_EQ(walk(visits, kFar, slow_link()).step, 9);
}

TEST(Walk, FramesThatAreLateDelayWhatIsFetchedIntoThem) {
  // Each visit is written for half a second after it is computed, and then the one after the next is fetched
  // into its frames.
  std::vector<Visit> visits = in_frames(10, computed(1, 50));
  for (Visit& visit : visits) visit.written = 50;
  EXPECT_DOUBLE_EQ(walk(visits, kFar, slow_disk()).step, 10);
  EXPECT_DOUBLE_EQ(walk(visits, kNear, slow_disk()).step, 15);
  for (Visit& visit : visits) {
    visit.written = 0;
    visit.after = {0, 30, 0, 100};
  }
  // A tenth of an update is done beside computing; the rest is waited for, and then the fetch.
  EXPECT_NEAR(walk(visits, {1, 2, 1}, slow_disk()).step, 10 * (1 + 0.27 + 0.5), 0.01);
  // With slots for all of it, only the fetch is waited for, which begins at the next access; with more frames
  // nothing is waited for.
  EXPECT_NEAR(walk(visits, {1, 2, 10}, slow_disk()).step, 10 * (1 + 0.5), 0.01);
  EXPECT_NEAR(walk(visits, {1, 3, 10}, slow_disk()).step, 10, 0.01);
}

TEST(Walk, WhatComesFromRanksTakesOfTheCoresWhereTheseDoNotWait) {
  std::vector<Visit> visits = in_frames(6, computed(1));
  for (Visit& visit : visits) visit.pulled = {50, 50};
  MachineRates rates = slow_link();
  rates.rank_processor_seconds = 0.005;
  EXPECT_DOUBLE_EQ(walk(visits, kFar, rates).step, 7.5);
  EXPECT_DOUBLE_EQ(walk(visits, kFar, rates).transfers, 1.5);
  rates.cores = 2;
  EXPECT_DOUBLE_EQ(walk(visits, kFar, rates).step, 6.75);
  for (Visit& visit : visits) visit.pulled = {200, 200};  // the cores wait for a second of each two
  EXPECT_DOUBLE_EQ(walk(visits, kFar, rates).step, 12);
}

}  // namespace sluice::engine::walk_test
