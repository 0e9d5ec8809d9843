#include "comm/worlds.h"
#include "testing.h"

// Links alone: packets, and sleep that no wake-up is lost to.
namespace sluice::comm::links_test {

using Clock = Links::Clock;
// A lost wake-up would take one such sleep; so a test that takes less has lost none.
constexpr std::chrono::seconds kSleep{40};

std::vector<std::byte> packet_of(std::size_t i, std::size_t size) {
  std::vector<std::byte> packet(size);
  for (std::size_t k = 0; k < size; ++k) packet[k] = static_cast<std::byte>(i * 131 + k * 7);
  return packet;
}
std::size_t size_of_packet(std::size_t i, std::size_t most) { return i % 5 == 0 ? most : i * 37 % most; }

void send(Links& links, int to, std::span<const std::byte> packet) {
  const std::size_t head = packet.size() / 3;
  while (!links.send(to, packet.first(head), packet.subspan(head))) links.wait(Clock::now() + kSleep);
}
void receive(Links& links, int from, const std::vector<std::byte>& expected) {
  const auto take = [&](std::span<const std::byte> packet) {
    EXPECT_TRUE(std::equal(packet.begin(), packet.end(), expected.begin(), expected.end()));
  };
  while (!links.receive(from, take)) links.wait(Clock::now() + kSleep);
}

class LinksTest : public testing::TestWithParam<World> {
 protected:
  void SetUp() override {
    if (GetParam() == World::kProcesses && !kForksAllowed)
      GTEST_SKIP() << "ThreadSanitizer follows no threads of forked processes";
    if (is_mpi(GetParam()) && !missing_for_mpi().empty()) GTEST_SKIP() << missing_for_mpi();
  }
  // MPI wakes a rank by polling, which takes longer.
  static std::size_t packets() { return is_mpi(GetParam()) ? 200 : 2000; }
  static void run(const std::function<void(Links& links)>& body) {
    const auto begin = Clock::now();
    run_ranks(
        GetParam(), 2, [&](LocalMemory& memory, int rank) { body(*links_of(GetParam(), memory, rank)); },
        8192);
    EXPECT_LT(Clock::now() - begin, kSleep);
  }
};

// Each rank answers each packet of the other one, so both sleep all the time.
TEST_P(LinksTest, NoPacketIsSleptThrough) {
  run([](Links& links) {
    for (std::size_t i = 0; i < packets(); ++i) {
      const auto packet = packet_of(i, size_of_packet(i, links.packet_bytes()));
      if (links.rank() == 0) send(links, 1, packet);
      receive(links, 1 - links.rank(), packet);
      if (links.rank() == 1) send(links, 0, packet);
    }
  });
}

// Rank 0 sends more than there is room for, and sleeps until rank 1 has made some.
TEST_P(LinksTest, NoRoomIsSleptThrough) {
  run([](Links& links) {
    for (std::size_t i = 0; i < packets(); ++i) {
      const auto packet = packet_of(i, size_of_packet(i, links.packet_bytes()));
      if (links.rank() == 0) send(links, 1, packet);
      if (links.rank() == 1 && i % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      if (links.rank() == 1) receive(links, 0, packet);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Links, LinksTest,
                         testing::Values(World::kThreads, World::kProcesses, World::kFaulty, World::kMpi));

TEST(LocalLinks, WakeEndsAWaitThatIsUnderWayOrFollows) {
  const auto begin = Clock::now();
  LocalMemory memory(1, kTestRing);
  const auto links = make_local_links(memory, 0);
  for (int i = 0; i < 200; ++i) {
    std::thread waker([&] { links->wake(); });
    links->wait(Clock::now() + kSleep);
    waker.join();
    links->wake();
    links->wait(Clock::now() + kSleep);
  }
  EXPECT_LT(Clock::now() - begin, kSleep);
  links->wait(Clock::now() + std::chrono::milliseconds(1));  // ends by itself
}

TEST(LocalLinks, LeavingEndsAWait) {
  const auto begin = Clock::now();
  LocalMemory memory(2, kTestRing);
  auto first = make_local_links(memory, 0), second = make_local_links(memory, 1);
  std::thread leaver([&] { second.reset(); });
  while (!first->gone(1)) first->wait(Clock::now() + kSleep);
  leaver.join();
  EXPECT_TRUE(first->gone(1)->in_order);
  EXPECT_LT(Clock::now() - begin, kSleep);
}

TEST(LocalLinks, ARankThatHasNotBegunIsNotGone) {
  LocalMemory memory(3, kTestRing);
  const auto links = make_local_links(memory, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // longer than between looks at locks
  EXPECT_FALSE(links->gone(1));
  memory.leave(1, false);
  EXPECT_FALSE(links->gone(1)->in_order);
  memory.leave(1, true);  // is too late
  EXPECT_FALSE(links->gone(1)->in_order);
}

}  // namespace sluice::comm::links_test
