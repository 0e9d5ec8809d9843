#include "engine/memory/nccl_turns.h"

#include <array>
#include <chrono>
#include <thread>
#include <vector>

#include "comm/worlds.h"
#include "testing.h"

namespace sluice::engine::nccl_turns_test {

// Each rank has two threads, which come to their turns at other times than those of other ranks.
TEST(NcclTurnsTest, AreTakenInOneOrder) {
  constexpr std::uint64_t kRanks = 3, kTurns = 40;
  std::array<std::vector<std::uint64_t>, kRanks> orders;
  comm::run_communicators(comm::World::kHosts, kRanks, [&](comm::Communicator& of) {
    NcclTurns turns(of);
    std::vector<std::uint64_t>& order = orders[static_cast<std::size_t>(of.rank())];
    const auto take = [&](std::uint64_t thread) {
      for (std::uint64_t turn = 0; turn < kTurns; ++turn) {
        const auto rank = static_cast<std::uint64_t>(of.rank());
        std::this_thread::sleep_for(
            std::chrono::microseconds((turn * 7 + rank * 13 + thread * 5) % 11 * 100));
        turns.take(2 * turn + thread, [&] { order.push_back(2 * turn + thread); });
      }
    };
    std::thread other([&] { take(1); });
    take(0);
    other.join();
    of.barrier(1, "the end of a test");
  });
  EXPECT_EQ(orders[0].size(), 2 * kTurns);
  EXPECT_EQ(orders[1], orders[0]);
  EXPECT_EQ(orders[2], orders[0]);
}

}  // namespace sluice::engine::nccl_turns_test
