#include "engine/memory/nccl_turns.h"

#include "comm/worlds.h"
#include "testing.h"
#include "thrown.h"

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

// The other thread of that rank does not wait for a turn that never ends.
TEST(NcclTurnsTest, AnErrorInATurnEndsTheTurnsOfItsRank) {
  comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& of) {
    NcclTurns turns(of);
    const auto take = [&](std::uint64_t key) {
      turns.take(key, [&] {
        if (of.rank() == 1 && key == 0) fail(ErrorCode::kIo, "the link is down");
      });
    };
    if (of.rank() == 0) {
      take(0);
      take(1);
    } else {
      std::thread other([&] { expect_error(ErrorCode::kIo, {"the link is down"}, [&] { take(1); }); });
      expect_error(ErrorCode::kIo, {"the link is down"}, [&] { take(0); });
      other.join();
    }
    of.barrier(1, "the end of a test");
  });
}

TEST(NcclTurnsTest, AFailureOfTheRunEndsTheWaitForATurn) {
  comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& of) {
    NcclTurns turns(of);
    if (of.rank() == 0) {
      turns.take(7, [] {});  // a key that the other rank does not come to
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return of.fail("the disk is full");
    }
    expect_error(ErrorCode::kIo, {"the disk is full"}, [&] { turns.take(1, [] {}); });
  });
}

}  // namespace sluice::engine::nccl_turns_test
