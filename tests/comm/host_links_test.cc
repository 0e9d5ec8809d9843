#include "comm/host_links.h"

#include <sched.h>

#include "comm/worlds.h"
#include "testing.h"
#include "thrown.h"

// How ranks find those of their host. That the links then work is a matter of the conformance tests.
namespace sluice::comm::host_links_test {

using std::chrono::milliseconds;

std::string host_of(int rank) { return rank % 2 == 0 ? "even" : "odd"; }

TEST(HostLinks, TellHowManyShareAHost) {
  run_ranks(World::kThreads, 5, [](LocalMemory& memory, int rank) {
    const HostLinks made =
        make_host_links(make_local_links(memory, rank), kTestRing, kMostSeconds, host_of(rank));
    EXPECT_EQ(made.ranks_here, rank % 2 == 0 ? 3 : 2);
    EXPECT_EQ(made.share_of_cpus, 1.0 / made.ranks_here);
    EXPECT_EQ(made.memory, host_links_bytes(made.ranks_here, kTestRing));
    EXPECT_FALSE(made.all_here);
    EXPECT_EQ(made.note, "");
    EXPECT_EQ(made.links->rank(), rank);
    EXPECT_EQ(made.links->size(), 5);
  });
}

// Where cores of ranks overlap, all of them together have each core once.
TEST(HostLinks, CountACoreThatSeveralRanksMayUseOnce) {
  cpu_set_t all;
  ASSERT_EQ(::sched_getaffinity(0, sizeof all, &all), 0);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE && cores.size() < 2; ++core)
    if (CPU_ISSET(core, &all)) cores.push_back(core);
  if (cores.size() < 2) GTEST_SKIP() << "this process may use one core alone";
  const std::vector<std::vector<int>> of_ranks = {{cores[0]}, cores, {cores[1]}, cores};
  std::array<double, 4> own{};
  run_ranks(World::kThreads, 4, [&](LocalMemory& memory, int rank) {
    const auto index = static_cast<std::size_t>(rank);
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int core : of_ranks[index]) CPU_SET(core, &set);
    ASSERT_EQ(::sched_setaffinity(0, sizeof set, &set), 0);  // of this thread
    const HostLinks made = make_host_links(make_local_links(memory, rank), kTestRing, kMostSeconds);
    own[index] = made.share_of_cpus * static_cast<double>(of_ranks[index].size());
  });
  EXPECT_THAT(own, testing::Pointwise(testing::DoubleNear(1e-12), {1.0 / 3, 2.0 / 3, 1.0 / 3, 2.0 / 3}));
}

TEST(HostLinks, NeedNoOthersWhereAllAreOnOneHost) {
  run_ranks(World::kThreads, 3, [](LocalMemory& memory, int rank) {
    const HostLinks made = make_host_links(make_local_links(memory, rank), kTestRing, kMostSeconds);
    EXPECT_TRUE(made.all_here);
    EXPECT_THROW(make_local_links(memory, rank), Error);  // those that were given have been left
  });
}

TEST(HostLinks, AreThoseThatWereGivenWhereARankIsAlone) {
  run_ranks(World::kThreads, 3, [](LocalMemory& memory, int rank) {
    auto between = make_local_links(memory, rank);
    const Links* const given = between.get();
    const HostLinks made = make_host_links(std::move(between), kTestRing, kMostSeconds, std::to_string(rank));
    EXPECT_EQ(made.links.get(), given);
    EXPECT_EQ(made.ranks_here, 1);
    EXPECT_EQ(made.memory, 0u);
  });
}

// No memory can be made with such a ring.
TEST(HostLinks, GoOnWithoutMemoryAndSayWhy) {
  run_ranks(World::kThreads, 4, [](LocalMemory& memory, int rank) {
    HostLinks made = make_host_links(make_local_links(memory, rank), 100, kMostSeconds, host_of(rank));
    EXPECT_EQ(made.memory, 0u);
    EXPECT_EQ(made.ranks_here, 2);
    EXPECT_THAT(made.note, rank < 2 ? HasSubstr("a ring of 100 bytes") : testing::HasSubstr("")) << rank;
    EXPECT_EQ(made.note.empty(), rank >= 2) << "the first one of the host tells";
    allocator::Ledger ledger;
    Communicator comm(std::move(made.links), kUnhurried, ledger);
    EXPECT_EQ(comm.exchange(1, "x", std::to_string(rank)), (std::vector<std::string>{"0", "1", "2", "3"}));
  });
}

TEST(HostLinks, NameARankThatDoesNotCome) {
  LocalMemory memory(2, kTestRing);
  const Watchdog watchdog;
  expect_error(ErrorCode::kIo, {"rank 1 has not come for 0.05 s"},
               [&] { make_host_links(make_local_links(memory, 0), kTestRing, milliseconds(50)); });
  LocalMemory left(2, kTestRing);
  left.leave(1, false);
  expect_error(ErrorCode::kIo, {"rank 1 is gone before the run has begun: its process has ended"},
               [&] { make_host_links(make_local_links(left, 0), kTestRing, kMostSeconds); });
}

// Links on which what a rank has sent comes after the news that it has left, which the contract allows.
class NewsFirst final : public Links {
 public:
  explicit NewsFirst(std::unique_ptr<Links> links) : links_(std::move(links)) {}
  int rank() const override { return links_->rank(); }
  int size() const override { return links_->size(); }
  std::size_t packet_bytes() const override { return links_->packet_bytes(); }
  bool send(int to, std::span<const std::byte> head, std::span<const std::byte> body) override {
    return links_->send(to, head, body);
  }
  bool receive(int from, const std::function<void(std::span<const std::byte>)>& take) override {
    return std::exchange(is_told_, false) && links_->receive(from, take);
  }
  void wait(Clock::time_point until) override { links_->wait(until); }
  void wake() override { links_->wake(); }
  std::optional<Gone> gone(int rank) override {
    is_told_ = true;
    std::this_thread::sleep_for(milliseconds(20));  // the other leaves meanwhile, if it is about to
    return links_->gone(rank);
  }

 private:
  const std::unique_ptr<Links> links_;
  bool is_told_ = false;
};

TEST(HostLinks, ReceiveWhatARankThatHasLeftHasSent) {
  const Watchdog watchdog;
  LocalMemory memory(2, kTestRing);
  const std::jthread first([&] {
    const HostLinks made = make_host_links(make_local_links(memory, 0), kTestRing, kMostSeconds, "x");
    EXPECT_TRUE(made.all_here);
  });
  const HostLinks made =
      make_host_links(std::make_unique<NewsFirst>(make_local_links(memory, 1)), kTestRing, kMostSeconds, "x");
  EXPECT_TRUE(made.all_here);
}

TEST(HostLinks, RefuseAGreetingThatIsNone) {
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{7}, std::size_t{32}, std::size_t{48}}) {
    const Watchdog watchdog;
    LocalMemory memory(2, kTestRing);
    const auto stranger = make_local_links(memory, 1);
    const std::vector<std::byte> garbage(bytes, std::byte{7});
    stranger->send(0, garbage, {});
    expect_error(ErrorCode::kCorrupt, {"rank 1"},
                 [&] { make_host_links(make_local_links(memory, 0), kTestRing, kMostSeconds); });
  }
}

// A descriptor that is offered as memory is checked before it is used.
TEST(HostLinks, RefuseMemoryThatIsNone) {
  const Watchdog watchdog;
  LocalMemory memory(2, kTestRing);
  const auto first = make_local_links(memory, 0);
  std::thread second([&] {
    const HostLinks made = make_host_links(make_local_links(memory, 1), kTestRing, kMostSeconds, "x");
    EXPECT_EQ(made.memory, 0u);
  });
  std::vector<std::uint64_t> packet;
  const auto take = [&](std::span<const std::byte> bytes) {
    packet.resize(bytes.size() / 8);
    std::memcpy(packet.data(), bytes.data(), packet.size() * 8);
  };
  const auto hear = [&] {
    while (!first->receive(1, take)) first->wait(Links::Clock::now() + milliseconds(10));
  };
  const auto tell = [&] { ASSERT_TRUE(first->send(1, std::as_bytes(std::span(packet)), {})); };
  hear();  // its card; this rank has the same host
  tell();
  packet = {packet[0], 0};  // the offer: this process's standard input is the memory
  tell();
  hear();
  EXPECT_EQ(packet[1], 0u);  // it does not share that
  tell();
  second.join();
}

}  // namespace sluice::comm::host_links_test
