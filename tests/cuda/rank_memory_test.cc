#include "engine/memory/rank_memory.h"

#include "comm/worlds.h"
#include "cuda/engine_fixture.h"
#include "cuda/file_limit.h"

// Host memory that ranks share.
namespace sluice::engine::twins {
namespace rank_memory_test {

// The last rank has none.
std::size_t bytes_of(int rank, int ranks) {
  return static_cast<std::size_t>(ranks - 1 - rank) * 16 * kHugePage;
}
// A process takes so much for itself while it looks at memory of others.
constexpr std::size_t kBeside = 8 * kMiB;

class RankMemoryTest : public DeviceEngineTest {
 protected:
  // Each rank writes its number, and looks at what the others have, where they share. Others' memory is none
  // of a process's own.
  void look(comm::World world, int ranks, bool shares, bool with_gpus, bool may_open_files = true) {
    device_.reset();
    fake()->begin({.devices = ranks});
    FileLimit limit;
    comm::run_communicators(world, ranks, [&](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_device(of.rank());
      const Layout layout({{"unit", {{"weight", {8}}}}});
      const auto optimizer = optim::make_optimizer({});
      Ranks all(of, layout, *optimizer, {false});
      allocator::Ledger ledger;
      const std::size_t bytes = bytes_of(of.rank(), ranks), before = allocator::resident_bytes();
      const std::size_t peak = allocator::peak_resident_bytes();  // also of what has made this process
      of.barrier(1, "all ranks");
      if (of.rank() == 0 && !may_open_files) limit.set(0);
      of.barrier(1, "the limit");
      RankMemory memory(ledger, *device, allocator::Purpose::kStaging, bytes, of.hosts().all_on_one());
      EXPECT_FALSE(memory.is_shared());
      memory.share(all, "a test's memory", with_gpus);
      EXPECT_EQ(memory.is_shared(), shares);
      EXPECT_EQ(ledger.snapshot().total[static_cast<std::size_t>(kHost)].current, bytes);
      if (bytes > 0) std::memset(memory.data(), of.rank() + 1, bytes);
      of.barrier(1, "what was written");
      for (int rank = 0; rank < ranks && memory.is_shared(); ++rank)
        for (std::size_t at = 0; at < bytes_of(rank, ranks); at += kDiskBlock)
          if (memory.of(rank)[at] != std::byte(rank + 1)) return ADD_FAILURE() << "byte " << at;
      if (world == comm::World::kProcesses) {
        EXPECT_LE(allocator::resident_bytes(), before + bytes + kBeside);
        EXPECT_LE(allocator::peak_resident_bytes(), std::max(peak, before + bytes + kBeside));
      }
      of.barrier(1, "what was seen");
      if (with_gpus && shares) copy(*device, memory, of.rank(), ranks);
      of.barrier(1, "what was copied");
    });
  }

  // To the rank's GPU, and back to memory of its own.
  static void copy(Device& device, const RankMemory& memory, int rank, int ranks) {
    allocator::Ledger ledger;
    const allocator::DeviceRegion there(ledger, device, allocator::Purpose::kStaging, kHugePage);
    const RegisteredRegion back(ledger, device, allocator::Purpose::kStaging, kHugePage);
    const Device::Stream stream = device.make_stream(false);
    for (int other = 0; other < ranks; ++other) {
      if (bytes_of(other, ranks) == 0) continue;
      device.copy_in(stream.get(), there.address(), memory.of(other), kHugePage);
      device.copy_out(stream.get(), back.data(), there.address(), kHugePage);
      device.synchronize(stream.get());
      EXPECT_EQ(back.data()[kHugePage - 1], std::byte(other + 1)) << "rank " << rank << " of " << other;
    }
  }
};

TEST_F(RankMemoryTest, IsReadByAllRanksOfAHostAndByTheirGpus) {
  SLUICE_NEEDS_THE_FAKE();
  for (const bool with_gpus : {false, true}) {
    look(comm::World::kThreads, 3, true, with_gpus);
    if (comm::kForksAllowed) look(comm::World::kProcesses, 3, true, with_gpus);
  }
}

TEST_F(RankMemoryTest, IsEachRanksOwnOnSeveralHostsAndWhereItCannotBeShared) {
  SLUICE_NEEDS_THE_FAKE();
  look(comm::World::kHosts, 3, false, true);
  testing::internal::CaptureStderr();
  look(comm::World::kThreads, 2, false, true, false);
  const std::string log = testing::internal::GetCapturedStderr();
  const std::string said = "a test's memory: ranks of this host send it";
  EXPECT_NE(log.find(said), std::string::npos) << log;
  EXPECT_EQ(log.find(said), log.rfind(said)) << "the same on each rank: " << log;
}

}  // namespace rank_memory_test
}  // namespace sluice::engine::twins
