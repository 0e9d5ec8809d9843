#include "cuda/ranks_on_gpus.h"

// Ranks that exchange gradients and parameters by NCCL.
namespace sluice::engine::twins {
namespace nccl_ranks_test {

class NcclRanksTest : public RanksOnGpusTest {
 protected:
  static Placed by_nccl(Placed place) {
    place.gpus_meet = place.by_nccl = true;
    return place;
  }
};

TEST_F(NcclRanksTest, HaveTheBitsOfTheCpusOnOneHostAndOnSeveral) {
  SLUICE_NEEDS_THE_FAKE();
  const std::array tiers = {kDevice, kHost, kDisk};
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    Case setup;
    setup.blocks = 2, setup.micro_batches = 1 + seed % 2;
    setup.clip = seed % 3 > 0 || setup.micro_batches > 1;
    setup.ends = seed % 4 == 2 || setup.micro_batches > 1;
    setup.device = 192 * kMiB;
    const std::size_t stage = seed % 4;
    const auto updates = stage == 3 || seed / 4 % 2 == 1 ? kHost : kDevice;
    world_ = seed / 2 % 2 == 0 ? comm::World::kMixedHosts : comm::World::kThreads;
    expect_bits_of_cpus(setup, seed % 3 == 0 ? 2 : 3,
                        by_nccl({stage, updates, tiers[seed % 2], tiers[seed / 3 % 2],
                                 updates == kHost ? kHost : tiers[seed % 3], true,
                                 seed / 4 % 2 == 0 ? Dtype::kBf16 : Dtype::kF32}),
                        static_cast<Schedule>(seed % 3), seed);
    if (HasFailure()) return;
  }
}

// More pieces pass in a step than there is memory for, on a GPU that works as late as it may; and units have
// fewer blocks of the grid than there are ranks.
TEST_F(NcclRanksTest, MemoryOfPiecesIsUsedAgainOnceTheGpuHasWhatWasThere) {
  SLUICE_NEEDS_THE_FAKE();
  Case setup;
  setup.device = 224 * kMiB;
  for (const std::size_t rows : {3, 300})
    for (const std::size_t stage : {0, 1}) {
      setup.blocks = rows < 10 ? 2 : 9, setup.rows = rows;
      expect_bits_of_cpus(setup, rows < 10 ? 4 : 2, by_nccl({stage, kDevice, kDevice, kDevice, kDevice}),
                          Schedule::kLate, 1);
    }
}

TEST_F(NcclRanksTest, WhatIsSentInAStepIsPlannedToTheByte) {
  SLUICE_NEEDS_THE_FAKE();
  constexpr int kRanks = 3;
  for (const std::size_t stage : {0, 1, 2})
    for (const auto updates : {kDevice, kHost}) {
      const Dtype type = (stage == 1) == (updates == kHost) ? Dtype::kF32 : Dtype::kBf16;
      Case all{.device = 256 * kMiB, .ends = stage == 2, .once = true};
      all = placed(all, by_nccl({stage, updates, kDevice, kDevice, updates, true, type}));
      SCOPED_TRACE(fmt::format("{}, stage {}, updates by the {}", name_of(type), stage, name_of(updates)));
      begin_devices(kRanks, Schedule::kRandom, 7);
      comm::run_communicators(comm::World::kMixedHosts, kRanks, [&](comm::Communicator& of) {
        const std::unique_ptr<Device> device = open_for(of);
        OnGpu gpu(of_rank(all, of), *device, &of);
        const auto received = [&] {
          gpu.engine.settle();
          of.barrier(1, "the step before");
          const std::uint64_t bytes = fake()->counts().of_devices[of.rank()].bytes_received;
          of.barrier(1, "the count");
          return bytes;
        };
        gpu.client.load();
        gpu.client.step(0);
        const std::uint64_t before = received();
        gpu.client.step(1);
        // Of a unit that is not cut the squares of sums are sent, too.
        const std::uint64_t planned = gpu.made.plan.step_bytes_received, found = received() - before;
        EXPECT_GE(found, planned);
        EXPECT_LE(found, planned + (stage == 0 ? planned / 128 : 0)) << "rank " << of.rank();
        EXPECT_LE(gpu.made.plan.step_bytes_from_hosts, planned);
        EXPECT_GT(gpu.made.plan.step_bytes_from_hosts, 0);
      });
    }
}

}  // namespace nccl_ranks_test
}  // namespace sluice::engine::twins
