#include "tests/bindings/c/network.h"

// Tests of ranks that exchange packets over functions of the caller.
namespace sluice_c_test::links_test {

TEST(LinksOfTheCaller, EndWithAnErrorThatNamesThem) {
  Network network(2);
  std::thread other([&] {
    const sluice_links links = network.links(1);
    sluice_ranks* ranks = nullptr;
    ASSERT_OK(sluice_ranks_create_links(&links, nullptr, &ranks));
    const RanksHandle handle(ranks, sluice_ranks_destroy);
    EXPECT_NE(sluice_ranks_barrier(ranks, "a meeting"), SLUICE_OK);
  });
  const sluice_links links = network.links(0);
  sluice_ranks* ranks = nullptr;
  ASSERT_OK(sluice_ranks_create_links(&links, nullptr, &ranks));
  {
    const RanksHandle handle(ranks, sluice_ranks_destroy);
    network.let_fail(0);
    EXPECT_NE(sluice_ranks_barrier(ranks, "a meeting"), SLUICE_OK);
    char* text = nullptr;
    EXPECT_OK(sluice_ranks_failure(ranks, &text));
    EXPECT_NE(std::string(text).find("the test's network of rank"), std::string::npos) << text;
    EXPECT_NE(std::string(text).find("returned 7"), std::string::npos) << text;
    sluice_text_destroy(text);
  }
  other.join();
}

// Makes a rank for each of `hosts`, which names its host, and runs body(rank, ranks) in a thread of its own.
template <class Body>
void with_ranks_on(Network& network, const std::vector<const char*>& hosts, const Body& body) {
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < hosts.size(); ++rank)
    threads.emplace_back([&, rank] {
      sluice_links links = network.links(rank);
      links.host = hosts[rank];
      sluice_ranks* ranks = nullptr;
      ASSERT_OK(sluice_ranks_create_links(&links, nullptr, &ranks));
      const RanksHandle handle(ranks, sluice_ranks_destroy);
      body(rank, ranks);
    });
  for (std::thread& thread : threads) thread.join();
}

// Of four ranks on two hosts, those of one exchange nothing over the caller's functions once they have met,
// and what is broadcast comes to the other host once.
TEST(LinksOfTheCaller, JoinHostsAlone) {
  Network network(4);
  std::atomic<uint64_t> came{0};
  with_ranks_on(network, {"a", "a", "b", "b"}, [&](uint32_t rank, sluice_ranks* ranks) {
    network.close(rank, rank ^ 1);
    std::vector<char> bytes(300'007, rank == 0 ? 'x' : 'y');
    ASSERT_OK(sluice_ranks_broadcast(ranks, "bytes", bytes.data(), bytes.size()));
    EXPECT_EQ(bytes, std::vector<char>(bytes.size(), 'x'));
    sluice_traffic traffic = SLUICE_INIT(sluice_traffic);
    ASSERT_OK(sluice_ranks_traffic(ranks, &traffic));
    came += traffic.received_from_hosts;
    ASSERT_OK(sluice_ranks_barrier(ranks, "the end"));
  });
  EXPECT_EQ(came, 300'007u);
}

// Ranks that wait for nothing between hosts leave the caller's functions alone, more and more.
TEST(LinksOfTheCaller, AreSeldomAskedWhereNothingComes) {
  Network network(3);
  with_ranks_on(network, {"a", "a", "b"}, [&](uint32_t rank, sluice_ranks* ranks) {
    ASSERT_OK(sluice_ranks_barrier(ranks, "a meeting"));
    if (rank == 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1200));
      const int before = network.calls_of(rank);
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      const int calls = network.calls_of(rank) - before;
      EXPECT_GT(calls, 0);
      EXPECT_LT(calls, 250);  // it looks each 10 ms or more, and then asks for a packet, and for life
    }
    ASSERT_OK(sluice_ranks_barrier(ranks, "the end"));
  });
}

// Where all are on one host, the functions are needed no more.
TEST(LinksOfTheCaller, EndWhereAllShareMemory) {
  Network network(2);
  with_ranks_on(network, {"a", "a"}, [&](uint32_t rank, sluice_ranks* ranks) {
    EXPECT_TRUE(network.has_left(rank));
    ASSERT_OK(sluice_ranks_barrier(ranks, "a meeting"));
  });
}

}  // namespace sluice_c_test::links_test
