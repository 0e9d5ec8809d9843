#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>

#include "cuda/ranks_on_gpus.h"

// Ranks on GPUs whose shards of parameters are on disk.
namespace sluice::engine::twins {
namespace gpu_shards_on_disk_test {

std::size_t shards_on_disk(const Plan& plan) {
  return static_cast<std::size_t>(std::ranges::count(plan.units, true, &UnitPlan::shard_on_disk));
}

class GpuShardsOnDisk : public RanksOnGpusTest {
 protected:
  // All shards that can be there, with what else each rank has in memory.
  static Case all_on_disk(Dtype dtype = Dtype::kF32) {
    Case setup;
    setup.optimizer = optimizer_of("adamw", Dtype::kF32, true);
    setup.dtype = dtype;
    setup.stage = 3;
    setup.device = 192 * kMiB;
    setup.updates = kHost;
    setup.places = {kDisk, kHost, kHost};
    return setup;
  }
  // Each rank has those of all units but the small one; of some it has none, where the optimizer cuts no
  // parameter.
  static void check_disk(const Made& made) {
    const Layout layout(made.profile.units);
    const RankOf& ranks = made.plan.ranks;
    const Shards shards(layout, *made.optimizer, kChunkGrain, Shards::of(ranks.rank, ranks.size, {}));
    for (UnitId unit = 1; unit < layout.units().size(); ++unit)
      EXPECT_EQ(made.plan.units[unit].shard_on_disk, shards.here(unit).size() > 0) << unit;
    EXPECT_GT(made.plan.serving_pieces, 0u);
    EXPECT_EQ(made.ledger.snapshot().total[static_cast<std::size_t>(kDisk)].peak, made.plan.disk_bytes);
  }
};

class GpuShardsOnDiskOfKind : public GpuShardsOnDisk,
                              public testing::WithParamInterface<std::tuple<int, const char*, Dtype, bool>> {
};

TEST_P(GpuShardsOnDiskOfKind, HaveTheBitsOfTheCpus) {
  const auto& [ranks, kind, dtype, gpus_meet] = GetParam();
  const bool in_8_bits = std::string(kind) == "8-bit adamw";
  Case setup;
  setup.dtype = dtype;
  setup.rows = 270, setup.steps = 3;
  setup.device = 256 * kMiB;
  setup.clip = (ranks == 2) == gpus_meet;
  setup.ends = setup.once = setup.clip;  // the ranks then keep parts of gradients
  const bool keeps_masters = setup.clip || dtype == Dtype::kF32;
  setup.optimizer =
      optimizer_of(in_8_bits ? "adamw" : kind, in_8_bits ? Dtype::kU8 : Dtype::kF32, keeps_masters);
  const std::uint64_t number = static_cast<std::uint64_t>(ranks) + (gpus_meet ? 1 : 0) + (in_8_bits ? 1 : 0) +
                               (dtype == Dtype::kF32 ? 1 : 0);
  const std::array tiers = {kDevice, kHost, kDisk};
  const allocator::Tier gradients = tiers[number % 3], state = tiers[1 + number % 2];
  expect_bits_of_cpus(setup, ranks, {3, kHost, kDisk, gradients, state, gpus_meet, dtype},
                      static_cast<Schedule>(number % 3), number, check_disk);
}

INSTANTIATE_TEST_SUITE_P(Ranks, GpuShardsOnDiskOfKind,
                         testing::Combine(testing::Values(2, 3),
                                          testing::Values("adamw", "8-bit adamw", "adafactor"),
                                          testing::Values(Dtype::kF32, Dtype::kBf16), testing::Bool()));

// They are sent, on several hosts and where a rank cannot open another one's memory.
TEST_F(GpuShardsOnDisk, HaveTheBitsOfTheCpusWhereRanksShareNoMemory) {
  SLUICE_NEEDS_THE_FAKE();
  Case setup = all_on_disk(Dtype::kBf16);
  world_ = comm::World::kMixedHosts;
  expect_bits_of_cpus(setup, 3, {3, kHost, kDisk, kHost, kDisk, false, Dtype::kBf16}, Schedule::kRandom, 1);
  world_ = comm::World::kThreads;
  expect_bits_of_cpus_without_shared_memory(setup);
}

// Each rank has other shards on disk, as its own memory allows.
TEST_F(GpuShardsOnDisk, MayBeOthersOnEachRank) {
  Case setup = all_on_disk();
  setup.blocks = 6;
  const Outcomes expected = train_on_cpus(setup, 3);
  begin_devices(3, Schedule::kLate, 3);
  const Outcomes found = train(3, [&](comm::Communicator& of) {
    const std::unique_ptr<Device> device = open_for(of);
    Case own = of_rank(setup, of);
    if (of.rank() == 1) own.places[0] = kHost;
    if (of.rank() == 2) own.shards_in_memory = {2, 3, 6};
    const auto look = [&](const Made& made) {
      constexpr std::array<std::size_t, 3> kOnDisk = {7, 0, 4};
      EXPECT_EQ(shards_on_disk(made.plan), kOnDisk.at(static_cast<std::size_t>(of.rank())));
    };
    return train_on_gpu(own, *device, look, &of);
  });
  EXPECT_TRUE(found == expected);
}

// A read for a fetch serves all ranks that come together; ranks that come apart read again. The plan counts
// fetches as if nothing of a unit were still in frames.
TEST_F(GpuShardsOnDisk, MoveAsManyBytesAsIsPlanned) {
  SLUICE_NEEDS_THE_FAKE();
  for (const auto& [optimizer, dtype] : {std::pair{"adamw", Dtype::kF32}, {"adafactor", Dtype::kBf16}}) {
    SCOPED_TRACE(fmt::format("{} {}", optimizer, name_of(dtype)));
    Case all = all_on_disk(dtype);
    all.optimizer = optimizer_of(optimizer, Dtype::kF32, true);
    all.blocks = 16, all.rows = 270;
    begin_devices(2, Schedule::kEarly, 1);
    comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_for(of);
      OnGpu gpu(of_rank(all, of), *device, &of);
      const Plan& plan = gpu.made.plan;
      gpu.client.load();
      gpu.client.step(0);
      const auto moved = [&] {
        gpu.engine.settle();
        of.barrier(1, "the step before");
        const offload::RecordStore::Counters counters = gpu.made.disk->counters();
        of.barrier(1, "the count");
        return counters;
      };
      const auto before = moved();
      gpu.client.step(1);
      const auto after = moved();
      EXPECT_EQ(after.bytes_written - before.bytes_written, plan.step_bytes_written);
      const std::uint64_t read = after.bytes_read - before.bytes_read;
      EXPECT_GE(read, plan.step_bytes_read / 3);
      EXPECT_LE(read, plan.step_bytes_read_apart);
      EXPECT_LT(plan.step_bytes_read, plan.step_bytes_read_apart);
    });
  }
}

// The disk still writes a rank's shards when its step has ended, and the rank makes no calls.
TEST_F(GpuShardsOnDisk, AreReadByOneRankAloneWhenTheirOwnersHaveWrittenThem) {
  for (const bool clip : {true, false}) {
    Case all = all_on_disk();
    all.ends = all.once = true;
    all.clip = clip;
    all.blocks = 6, all.rows = 300;
    all.device = 256 * kMiB;
    const auto looked = [&](const Case& setup, auto&& begin) {
      return train(2, [&](comm::Communicator& of) {
        Outcome outcome;
        const Case own = of_rank(setup, of);
        begin(own, of, [&](AnyOrderEngine& engine, Client& client, Hands& hands) {
          client.load();
          client.step(0);
          for (UnitId unit = 0; of.rank() == 1 && unit < engine.layout().units().size(); ++unit) {
            engine.acquire(unit, Hold::kRead);
            for (ParameterId p = engine.layout().first_parameter(unit);
                 p < engine.layout().end_parameter(unit); ++p)
              hands.look(engine.parameter(p), client.bytes(p));
            engine.release(unit);
          }
          outcome.seen = hands.seen();
          of.barrier(2, "the look");
        });
        return outcome;
      });
    };
    Case on_cpus = all;
    on_cpus.device = 0, on_cpus.places = {}, on_cpus.updates = {};
    const Outcomes expected = looked(on_cpus, [](const Case& own, comm::Communicator& of, const auto& body) {
      Made made(own, nullptr, &of);
      HandsOnCpu hands;
      Client client(own, *made.engine, hands);
      body(*made.engine, client, hands);
    });
    all.disk_microseconds = 20'000;
    begin_devices(2, Schedule::kLate, 1);
    const Outcomes found = looked(all, [](const Case& own, comm::Communicator& of, const auto& body) {
      const std::unique_ptr<Device> device = open_for(of);
      OnGpu gpu(own, *device, &of);
      body(gpu.engine, gpu.client, gpu.hands);
    });
    EXPECT_TRUE(found == expected) << (clip ? "clipped" : "at once");
  }
}

TEST_F(GpuShardsOnDisk, ThatCannotBeReadEndTheWorkOfAllRanksByName) {
  for (const bool shares : {true, false}) {
    Case all = all_on_disk();
    begin_devices(2, Schedule::kRandom, 1);
    std::array<std::string, 2> errors;
    comm::run_communicators(shares ? comm::World::kThreads : comm::World::kMixedHosts, 2,
                            [&](comm::Communicator& of) {
                              const std::unique_ptr<Device> device = open_for(of);
                              Case own = of_rank(all, of);
                              own.disk_read_errors = of.rank() == 0 ? 1 : 0;
                              OnGpu gpu(own, *device, &of);
                              gpu.client.load();
                              try {
                                gpu.client.step(0);
                              } catch (const Error& error) {
                                errors[static_cast<std::size_t>(of.rank())] = error.what();
                                of.fail(error.what());
                              }
                            });
    for (const std::string& error : errors)
      EXPECT_THAT(error, testing::HasSubstr("shard of the parameters of block."));
    EXPECT_THAT(errors[1], testing::HasSubstr("rank 0"));
  }
}

TEST_F(GpuShardsOnDisk, AreChosenWhereNoPlanHasAllInMemory) {
  for (const bool gpus_meet : {false, true}) {
    Case setup = all_on_disk(Dtype::kBf16);
    setup.blocks = 12, setup.rows = 2000;
    setup.places = {};
    setup.updates = {};
    setup.ranks = {0, 2};
    setup.ranks.gpus_meet = gpus_meet;
    setup.device = 256 * kMiB;
    std::size_t all = 0, some = 0, none = 0;
    for (std::uint64_t memory = 64 * kMiB; memory < kGiB; memory += 4 * kMiB) {
      setup.memory = memory;
      try {
        const Plan plan = plan_of(setup);
        EXPECT_LE(plan.peak_memory, memory);
        const std::size_t on_disk = shards_on_disk(plan);
        EXPECT_TRUE(on_disk == 0 || none == 0) << "less memory was enough for all";
        (on_disk == 0 ? none : on_disk < plan.units.size() - 1 ? some : all) += 1;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kBudget);
        EXPECT_EQ(all + some + none, 0u) << "less memory was enough";
      }
    }
    EXPECT_TRUE(some > 0 && none > 0) << all << ' ' << some << ' ' << none;
  }
}

TEST_F(GpuShardsOnDisk, TakeTheDisksTimeInAStep) {
  Case setup = all_on_disk();
  setup.ranks = {0, 2};
  setup.rates.disk_read = setup.rates.disk_write = 1e8;
  const Plan on_disk = plan_of(setup);
  setup.places[0] = kHost;
  const double more = on_disk.device_time.step - plan_of(setup).device_time.step;
  EXPECT_GT(on_disk.device_time.disk, 0);
  EXPECT_NEAR(more, on_disk.device_time.disk, 0.2 * on_disk.device_time.disk);
}

// The CPU updates shards on disk.
TEST_F(GpuShardsOnDisk, AreNotUpdatedByGpus) {
  for (const bool gpus_meet : {false, true})
    for (const bool asks_for_state : {false, true}) {
      Case setup = all_on_disk();
      setup.ranks = {0, 2};
      setup.ranks.gpus_meet = gpus_meet;
      setup.updates = {};
      if (asks_for_state)
        setup.places[2] = kDevice;
      else
        setup.updates = kDevice;
      expect_error(
          ErrorCode::kInvalidArgument,
          {asks_for_state ? "optimizer state on the GPU is asked for" : "updates on the GPU are asked for",
           "which is asked to be on disk", "leave out the place of parameters"},
          [&] { plan_of(setup); });
    }
}

}  // namespace gpu_shards_on_disk_test
}  // namespace sluice::engine::twins
