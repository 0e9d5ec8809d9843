#include "engine/machine/link_rate.h"

#include <gtest/gtest.h>

#include <mutex>
#include <vector>

#include "comm/worlds.h"

namespace sluice::engine {
namespace {

std::vector<Link> links_of_ranks(int ranks) {
  std::mutex mutex;
  std::vector<Link> found;
  comm::run_communicators(comm::World::kThreads, ranks, [&](comm::Communicator& communicator) {
    const Link link = measure_link(communicator);
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

}  // namespace
}  // namespace sluice::engine
