#include "engine/memory/rank_memory.h"

#include <gmock/gmock.h>
#include <sys/resource.h>

#include <cstring>

#include "comm/worlds.h"
#include "cuda/engine_fixture.h"

// Host memory that ranks share.
namespace sluice::engine::twins {
namespace rank_memory_test {

constexpr std::size_t kBytes = 2 * kHugePage;

// The most files that this process may have open; no file can be made or opened where that is 0.
class FileLimit {
 public:
  FileLimit() { EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0); }
  ~FileLimit() { set(before_.rlim_cur); }
  void set(rlim_t files) {
    rlimit changed = before_;
    changed.rlim_cur = files;
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &changed), 0);
  }

 private:
  rlimit before_{};
};

class RankMemoryTest : public DeviceEngineTest {
 protected:
  // Each rank writes its number, and looks at what the others have, where they share.
  void look(comm::World world, int ranks, bool shares, bool may_open_files = true) {
    device_.reset();
    fake()->begin({.devices = ranks});
    FileLimit limit;
    comm::run_communicators(world, ranks, [&](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_device(of.rank());
      const Layout layout({{"unit", {{"weight", {8}}}}});
      const auto optimizer = optim::make_optimizer({});
      Ranks all(of, layout, *optimizer, {false});
      allocator::Ledger ledger;
      of.barrier(1, "all ranks");
      if (of.rank() == 0 && !may_open_files) limit.set(0);
      of.barrier(1, "the limit");
      RankMemory memory(ledger, *device, allocator::Purpose::kStaging, kBytes, of.hosts().all_on_one());
      EXPECT_FALSE(memory.is_shared());
      memory.share(all, "a test's memory");
      EXPECT_EQ(memory.is_shared(), shares);
      EXPECT_EQ(ledger.snapshot().total[static_cast<std::size_t>(kHost)].current, kBytes);
      std::memset(memory.data(), of.rank() + 1, kBytes);
      of.barrier(1, "what was written");
      for (int rank = 0; rank < ranks && memory.is_shared(); ++rank)
        EXPECT_EQ(*memory.of(rank, memory.data() + kBytes - 1), std::byte(rank + 1));
      of.barrier(1, "what was seen");
    });
  }
};

TEST_F(RankMemoryTest, IsReadByAllRanksOfAHost) {
  SLUICE_NEEDS_THE_FAKE();
  look(comm::World::kThreads, 3, true);
  if (comm::kForksAllowed) look(comm::World::kProcesses, 2, true);
}

TEST_F(RankMemoryTest, IsEachRanksOwnOnSeveralHostsAndWhereItCannotBeShared) {
  SLUICE_NEEDS_THE_FAKE();
  look(comm::World::kHosts, 3, false);
  look(comm::World::kThreads, 2, false, false);
}

}  // namespace rank_memory_test
}  // namespace sluice::engine::twins
