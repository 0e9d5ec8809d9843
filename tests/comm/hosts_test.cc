#include "comm/hosts.h"

#include "comm/values.h"
#include "comm/worlds.h"
#include "testing.h"

// A host receives no more from others than it needs. The conformance tests show that the sums are right.
namespace sluice::comm::hosts_test {

class HostsTest : public testing::TestWithParam<std::tuple<World, int>> {
 protected:
  World world() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }
  std::size_t host(int rank) const { return static_cast<std::size_t>(host_of(world(), rank)); }
  // Returns how many elements the parts of ranks of the same host, or of others, have.
  std::size_t elements(int rank, bool of_host, const std::vector<std::size_t>& borders) const {
    std::size_t sum = 0;
    for (int other = 0; other < ranks(); ++other)
      if ((host(other) == host(rank)) == of_host)
        sum += borders[static_cast<std::size_t>(other) + 1] - borders[static_cast<std::size_t>(other)];
    return sum;
  }
  using Call = std::function<void(Communicator& comm, Array array, Done done)>;
  // Expects that so many elements come to each host in a call, whichever of its ranks they come to.
  void expect(const Call& call, const std::function<std::size_t(int rank)>& elements_of_host) {
    std::array<std::atomic<std::size_t>, 8> came{};
    run_communicators(world(), ranks(), [&](Communicator& comm) {
      std::vector<float> values(kCount, 1);
      Ending end;
      const std::uint64_t before = comm.counters().received_from_hosts;
      call(comm, {values.data(), Dtype::kF32}, end.done());
      end.wait();
      came[host(comm.rank())] += (comm.counters().received_from_hosts - before) / sizeof(float);
    });
    for (int rank = 0; rank < ranks(); ++rank)
      EXPECT_EQ(came[host(rank)], elements_of_host(rank)) << "of rank " << rank;
  }
  static constexpr std::size_t kCount = 300'007;
};
// Two, three and four hosts of two ranks.
INSTANTIATE_TEST_SUITE_P(Links, HostsTest,
                         testing::Combine(testing::Values(World::kHosts), testing::Values(4, 6, 8)));

TEST(Hosts, ShareWhatIsRelayedAmongTheirRanks) {
  for (const std::vector<int>& numbers :
       {std::vector<int>{0, 0, 1, 1}, {0, 1, 0, 1}, {7, 7, 3, 4}, {0, 0, 0, 1, 1, 1, 2, 2, 2}}) {
    const Hosts hosts(numbers);
    for (int rank = 0; rank < hosts.ranks(); ++rank) {
      std::vector<std::size_t> times(numbers.size());
      for (int outer = 0; outer < hosts.ranks(); ++outer)
        if (!hosts.on_one(rank, outer)) ++times[static_cast<std::size_t>(hosts.relay(rank, outer))];
      std::size_t least = SIZE_MAX, most = 0;
      for (const int member : hosts.with(rank)) {
        least = std::min(least, times[static_cast<std::size_t>(member)]);
        most = std::max(most, times[static_cast<std::size_t>(member)]);
      }
      EXPECT_LE(most - least, 1u) << "on the host of rank " << rank << " of " << numbers.size();
    }
  }
}

TEST_P(HostsTest, GetOneSumOfEachOther) {
  const auto borders = borders_of(5, kCount, ranks());
  const auto hosts = static_cast<std::size_t>(ranks()) / 2;
  expect([&](Communicator& comm, Array array,
             Done done) { comm.reduce_scatter(1, "x", array, borders, std::move(done)); },
         [&](int rank) { return (hosts - 1) * elements(rank, true, borders); });
}

TEST_P(HostsTest, GetWhatIsGatheredOnce) {
  const auto borders = borders_of(5, kCount, ranks());
  expect([&](Communicator& comm, Array array,
             Done done) { comm.all_gather(1, "x", array, borders, std::move(done)); },
         [&](int rank) { return elements(rank, false, borders); });
}

TEST_P(HostsTest, GetSumsOfAllOnce) {
  const auto parts = static_cast<std::size_t>(ranks());
  std::vector<std::size_t> borders{0};  // the first parts have one element more
  for (std::size_t rank = 0; rank < parts; ++rank)
    borders.push_back(borders.back() + kCount / parts + (rank < kCount % parts ? 1 : 0));
  expect([&](Communicator& comm, Array array,
             Done done) { comm.all_reduce(1, "x", array, kCount, std::move(done)); },
         [&](int rank) {
           return (parts / 2 - 1) * elements(rank, true, borders) + elements(rank, false, borders);
         });
}

TEST_P(HostsTest, GetWhatIsBroadcastOnce) {
  expect(
      [&](Communicator& comm, Array array, Done done) {
        comm.broadcast(1, "x", {static_cast<std::byte*>(array.data), 4 * kCount}, 3, std::move(done));
      },
      [&](int rank) { return host(rank) == host(3) ? 0 : kCount; });
}

// Ranks 1 to 4 of 6 have of ((0 + 1) + (2 + 3)) + (4 + 5) the sums 1, 2 + 3 and 4.
TEST(SumNodes, AreTheLargestWithinARange) {
  const std::vector<SumNode> nodes = nodes_within(order_of_ranks(6), [](int r) { return r >= 1 && r < 5; });
  ASSERT_EQ(nodes.size(), 3u);
  EXPECT_EQ(nodes[1].first, 2u);
  EXPECT_EQ(nodes[1].last, 4u);
  EXPECT_EQ(nodes[0].merges, 1u);
  EXPECT_EQ(nodes[1].merges, 1u);
  EXPECT_EQ(nodes[2].merges, 0u);
}

// Ranks 1 and 2 of 0, 1, 2, 0, 1, 2 have of ((0 + 1) + (2 + 0)) + (1 + 2) three sums.
TEST(SumNodes, AreTheLargestWhereRanksTakeTurns) {
  const std::vector<std::size_t> borders = {0, 1, 2, 3, 4, 5, 6};
  const std::vector<int> owners = {0, 1, 2, 0, 1, 2};
  const std::vector<SumNode> nodes =
      nodes_within(pairwise_order(borders, owners), [](int r) { return r > 0; });
  ASSERT_EQ(nodes.size(), 3u);
  EXPECT_EQ(nodes[0].merges, 1u);
  EXPECT_EQ(nodes[1].first, 2u);
  EXPECT_EQ(nodes[1].last, 3u);
  EXPECT_EQ(nodes[1].merges, 0u);
  EXPECT_EQ(nodes[2].first, 4u);
  EXPECT_EQ(nodes[2].last, 6u);
  EXPECT_EQ(nodes[2].merges, 1u);
}

}  // namespace sluice::comm::hosts_test
