#include "offload/disk_trials.h"

#include "offload/support.h"
#include "testing.h"

namespace sluice::offload::disk_trials_test {
using namespace sluice::offload::testing;

DiskTrial trial(IoWay way, std::size_t block, unsigned count, double read, double write) {
  DiskTrial result;
  result.io.way = way;
  result.io.block_bytes = block;
  (way == IoWay::kUring ? result.io.queue_depth : result.io.threads) = count;
  result.rates = {read, write};
  return result;
}

TEST(BestTrial, IsTheQuickestWhereNoneIsNear) {
  const std::vector<DiskTrial> trials = {trial(IoWay::kUring, kMiB, 2, 1e9, 2e9),
                                         trial(IoWay::kThreads, kMiB, 16, 2e9, 2e9),
                                         trial(IoWay::kUring, kMiB, 4, 1e9, 3e9)};
  EXPECT_EQ(best_trial(trials).io.way, IoWay::kThreads);
}

TEST(BestTrial, CountsWritingAndReadingAlike) {
  // A byte written and one read take 2 ns on the first and 1.25 ns on the second.
  const std::vector<DiskTrial> trials = {trial(IoWay::kUring, kMiB, 8, 9e8, 9e9),
                                         trial(IoWay::kUring, kMiB, 8, 2e9, 1.4e9)};
  EXPECT_EQ(best_trial(trials).rates.read, 2e9);
}

TEST(BestTrial, AmongThoseNearTheQuickestHasTheFewestBytesUnderWayAndThenARing) {
  const std::vector<DiskTrial> trials = {
      trial(IoWay::kUring, kMiB, 16, 2e9, 2e9), trial(IoWay::kThreads, kMiB, 4, 1.99e9, 1.99e9),
      trial(IoWay::kUring, kMiB, 4, 1.96e9, 1.96e9), trial(IoWay::kUring, kMiB, 2, 1.8e9, 1.8e9)};
  const DiskTrial& best = best_trial(trials);
  EXPECT_EQ(best.io.way, IoWay::kUring);
  EXPECT_EQ(in_flight(best.io), 4 * kMiB);
}

TEST(TryDisk, FindsWhatItTriedAndLeavesNothing) {
  const DirectFolder folder;
  if (!folder.found()) GTEST_SKIP() << kNoDirectFolder;
  const std::vector<DiskTrial> trials = try_disk(folder.path(), 4 * kMiB);
  bool threads = false, ring = false;
  for (const DiskTrial& found : trials) {
    EXPECT_GT(found.rates.read, 0);
    EXPECT_GT(found.rates.write, 0);
    EXPECT_GT(found.steady, 0);
    EXPECT_LE(found.steady, 1);
    EXPECT_LE(in_flight(found.io), kMostInFlight);
    (found.io.way == IoWay::kUring ? ring : threads) = true;
  }
  EXPECT_TRUE(threads);
  EXPECT_EQ(ring, uring_available(nullptr));
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace sluice::offload::disk_trials_test
