#include "engine/machine/clocks.h"

#include "comm/worlds.h"
#include "testing.h"

namespace sluice::engine::clocks_test {

constexpr std::int64_t kSecond = 1'000'000'000;

// Each rank's clock is ahead of rank 0's by the same amount more than that of the rank before.
std::vector<std::vector<ClockReading>> readings_of(comm::World world, int ranks, std::int64_t ahead) {
  std::mutex mutex;
  std::vector<std::vector<ClockReading>> found;
  comm::run_communicators(world, ranks, [&](comm::Communicator& communicator) {
    const auto readings = read_clocks(
        communicator, [ahead = ahead * communicator.rank()] { return steady_nanoseconds() + ahead; });
    const std::lock_guard lock(mutex);
    found.push_back(readings);
  });
  return found;
}

// They are, whatever the links do to the packets on their way.
TEST(ClocksTest, AreReadWithinTheUncertainty) {
  for (const comm::World world : {comm::World::kThreads, comm::World::kFaulty})
    for (const int ranks : {1, 2, 4})
      for (const std::int64_t ahead : {std::int64_t{0}, 1000 * kSecond, -7 * kSecond}) {
        const auto found = readings_of(world, ranks, ahead);
        ASSERT_EQ(found.size(), static_cast<std::size_t>(ranks));
        ASSERT_EQ(found[0].size(), static_cast<std::size_t>(ranks));
        EXPECT_EQ(found[0][0].ahead, 0);
        EXPECT_EQ(found[0][0].uncertainty, 0);
        for (int rank = 1; rank < ranks; ++rank) {
          const ClockReading& reading = found[0][static_cast<std::size_t>(rank)];
          EXPECT_GT(reading.uncertainty, 0);
          EXPECT_LE(std::abs(reading.ahead - ahead * rank), reading.uncertainty);
        }
      }
}

TEST(ClocksTest, AreTheSameOnAllRanks) {
  const auto found = readings_of(comm::World::kThreads, 3, kSecond);
  for (const auto& readings : found)
    for (std::size_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(readings[rank].time, found[0][rank].time);
      EXPECT_EQ(readings[rank].ahead, found[0][rank].ahead);
      EXPECT_EQ(readings[rank].uncertainty, found[0][rank].uncertainty);
    }
}

// The clock was 100 s ahead, and at 1,000 s of its own 110 s.
TEST(ClocksTest, DriftEvenlyBetweenTwoReadings) {
  const ClockReading first = {0, 100 * kSecond, 5}, last = {1000 * kSecond, 110 * kSecond, 5};
  EXPECT_EQ(time_of_first(first, last, 0), -100 * kSecond);
  EXPECT_EQ(time_of_first(first, last, 500 * kSecond), 395 * kSecond);
  EXPECT_EQ(time_of_first(first, last, 1000 * kSecond), 890 * kSecond);
  EXPECT_EQ(time_of_first(first, last, -10 * kSecond), -110 * kSecond);
  EXPECT_EQ(time_of_first(first, last, 2000 * kSecond), 1890 * kSecond);
  EXPECT_EQ(time_of_first(first, first, 7), 7 - 100 * kSecond);
}

}  // namespace sluice::engine::clocks_test
