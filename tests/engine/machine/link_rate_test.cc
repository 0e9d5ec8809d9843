#include "engine/machine/link_rate.h"

#include "comm/worlds.h"
#include "core/bytes.h"
#include "testing.h"

namespace sluice::engine::link_rate_test {

std::vector<Link> links_of_ranks(int ranks, std::uint64_t memory = kGiB) {
  std::mutex mutex;
  std::vector<Link> found;
  comm::run_communicators(comm::World::kThreads, ranks, [&](comm::Communicator& communicator) {
    const Link link = measure_link(communicator, memory);
    const std::lock_guard lock(mutex);
    found.push_back(link);
  });
  return found;
}

TEST(LinkRateTest, IsTheSameOnAllRanks) {
  for (const int ranks : {2, 3, 4}) {
    const std::vector<Link> found = links_of_ranks(ranks);
    for (const Link& link : found) {
      EXPECT_GT(link.bandwidth, 0);
      EXPECT_GT(link.latency, 0);
      EXPECT_EQ(link.bandwidth, found[0].bandwidth);
      EXPECT_EQ(link.latency, found[0].latency);
    }
  }
}

// The buffer has what all ranks give, and each rank receives no more than that in a gather.
TEST(LinkRateTest, TakesNoMoreMemoryThanOneRankHas) {
  constexpr std::uint64_t kGathers = 3;  // of a size
  for (const std::uint64_t memory : {std::uint64_t{0}, 2 * kMiB, 5 * kMiB}) {
    comm::run_communicators(comm::World::kThreads, 3, [&](comm::Communicator& communicator) {
      EXPECT_GT(measure_link(communicator, communicator.rank() == 1 ? memory : kGiB).bandwidth, 0);
      // Sizes grow fourfold, so that all of them are less than 4 / 3 of the largest.
      EXPECT_LE(communicator.counters().received, kGathers * std::max(memory, 2 * kMiB) * 2 / 3 * 4 / 3);
      communicator.barrier(1, "the end of a test");
    });
  }
}

}  // namespace sluice::engine::link_rate_test
