#include <atomic>
#include <chrono>

#include "cuda/ranks_on_gpus.h"
#include "engine/machine/between_gpus.h"
#include "engine/ranks/agreement.h"
#include "forbidden.h"

// Ranks on GPUs compute, send and fail as planned wherever their parts are.
namespace sluice::engine::twins {
namespace ranks_test {

// The settings on which the bits depend, and the way of the test below with which this one begins.
struct Kind {
  const char* optimizer;
  Dtype dtype, state;
  int ranks;
  std::uint64_t first;
};

class KindsOfRanksOnGpus : public RanksOnGpusTest, public testing::WithParamInterface<Kind> {};

// Kinds together have each stage with clipping and without, where the GPUs meet and where the host joins
// them; each has two of three stages.
TEST_P(KindsOfRanksOnGpus, HaveTheBitsOfTheCpusWhereverPartsAre) {
  const auto& [name, dtype, state, ranks, first] = GetParam();
  Case setup;
  setup.optimizer = optimizer_of(name, state, true);
  setup.dtype = dtype;
  setup.micro_batches = 2, setup.blocks = 2;
  const bool by_gpu = std::string(name) != "adafactor";
  const std::array tiers = {kDevice, kHost, kDisk};
  std::uint64_t seed = first;
  constexpr std::array<std::size_t, 4> kLeftOut = {3, 1, 0, 3};
  for (const std::size_t stage : {0, 1, 3}) {  // with several micro-batches 2 is as 1
    if (stage == kLeftOut[first % kLeftOut.size()]) continue;
    setup.stage = stage;
    setup.clip = (stage + first) % 2 == 0;
    const Outcomes expected = train_on_cpus(setup, ranks);
    setup.device = 192 * kMiB;
    for (const auto updates : {kDevice, kHost}) {
      if (updates == kDevice && !by_gpu) continue;
      ++seed;
      setup.updates = updates;
      setup.places = {tiers[seed % 3], tiers[seed / 2 % 3],
                      updates == kDevice ? tiers[(seed + 1) % 3] : tiers[1 + seed % 2]};
      if (stage == 3 && updates == kDevice) setup.places[0] = kDevice;  // the CPU updates shards elsewhere
      setup.ranks.gpus_meet = seed % 2 == 1 || (stage == 3 && updates == kDevice);
      setup.ranks.by_nccl = fake() != nullptr && seed % 4 == 1 && !(stage == 3 && updates == kDevice);
      SCOPED_TRACE(fmt::format(
          "stage {}, {}, updates by the {}, {} {} {}", setup.stage, setup.clip ? "clipped" : "at once",
          name_of(updates), name_of(*setup.places[0]), name_of(*setup.places[1]), name_of(*setup.places[2])));
      begin_devices(ranks, static_cast<Schedule>(seed % 3), seed);
      world_ = setup.ranks.by_nccl || (seed % 4 == 0 && !setup.ranks.gpus_meet) ? comm::World::kMixedHosts
                                                                                : comm::World::kThreads;
      expect_twins(setup, expected);
      if (HasFailure()) return;
    }
  }
}

// A rank of which the unit's shard is all padding waits for nothing of the GPU where it updates.
TEST_F(RanksOnGpusTest, TheGpuIsDoneWithWhatOtherRanksWriteInTheHostsMemory) {
  Case setup;
  setup.optimizer = optimizer_of("adamw", Dtype::kU8, true);
  setup.clip = false;
  setup.device = 192 * kMiB;
  expect_bits_of_cpus(setup, 3, {1, kHost, kHost, kDisk, kHost, false, Dtype::kBf16}, Schedule::kLate, 0);
}

// The fake driver has at most eight devices.
TEST_F(RanksOnGpusTest, HaveTheBitsOfTheCpusOnEightGpus) {
  SLUICE_NEEDS_THE_FAKE();
  Case setup;
  setup.once = true;
  setup.blocks = 2;
  setup.device = 192 * kMiB;
  expect_bits_of_cpus(setup, 8, {3, kHost, kHost, kDevice, kHost, true, Dtype::kBf16}, Schedule::kRandom, 8);
}

// More pieces pass in a step than there is memory for, on a GPU that works as late as it may.
TEST_F(RanksOnGpusTest, MemoryOfPiecesIsUsedAgainOnceTheGpuHasWhatWasThere) {
  SLUICE_NEEDS_THE_FAKE();
  Case setup;
  setup.blocks = 9, setup.rows = 300;
  setup.device = 224 * kMiB;
  for (const Placed& p :
       {Placed{0, kDevice, kDevice, kDevice, kDevice}, Placed{1, kDevice, kDevice, kDevice, kDevice, true},
        Placed{3, kHost, kDevice, kDevice, kHost}, Placed{3, kDevice, kDevice, kDevice, kDevice, true}})
    expect_bits_of_cpus(setup, 2, p, Schedule::kLate, 1);
}

TEST_F(RanksOnGpusTest, WhatPassesTheLinksInAStepIsPlannedToTheByte) {
  SLUICE_NEEDS_THE_FAKE();
  constexpr int kRanks = 3;
  for (int number = 0;
       Placed where :
       {Placed{0, kDevice, kDevice, kDevice, kDevice}, Placed{1, kDevice, kDevice, kDevice, kDevice},
        Placed{0, kHost, kHost, kHost, kHost}, Placed{1, kHost, kDevice, kHost, kHost},
        Placed{0, kDevice, kDevice, kHost, kDevice}, Placed{3, kHost, kHost, kHost, kHost},
        Placed{0, kDevice, kDevice, kDevice, kDevice, true}, Placed{1, kHost, kHost, kHost, kHost, true},
        Placed{1, kDevice, kDevice, kDevice, kDevice, true},
        Placed{2, kDevice, kDevice, kDevice, kDevice, true}, Placed{2, kDevice, kDevice, kDevice, kHost},
        Placed{3, kDevice, kDevice, kDevice, kDevice, true}, Placed{2, kHost, kHost, kHost, kHost, true},
        Placed{3, kHost, kHost, kHost, kHost, true}}) {
    const auto [stage, updates, parameters, gradients, state, gpus_meet, type, by_nccl] = where;
    if (number++ / 2 % 2 == 1) where.dtype = Dtype::kBf16;
    SCOPED_TRACE(text(where));
    Case all;
    all.once = true;
    all.device = 128 * kMiB;
    all.ends = stage >= 2;
    all.each_backward = stage >= 2 && number % 2 == 0;
    if (all.each_backward) all.micro_batches = 2;
    all = placed(all, where);
    begin_devices(kRanks, Schedule::kRandom, 7);
    fake_cuda::Counts before, after;
    std::atomic<std::uint64_t> in = 0, out = 0;  // planned, with what the client looks at
    comm::run_communicators(comm::World::kThreads, kRanks, [&](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_for(of);
      const Case setup = of_rank(all, of);
      OnGpu gpu(setup, *device, &of);
      EXPECT_EQ(gpu.made.plan.shard_place(), shards_of(all));
      gpu.client.load();
      gpu.client.step(0);
      // Nothing of a step is left to be done in the next one where all ranks have waited for their GPUs.
      std::uint64_t received = 0;
      const auto count = [&](fake_cuda::Counts& counts, std::uint64_t call) {
        device->synchronize(gpu.stream.get());
        received = of.counters().received - received;
        of.barrier(call, "the step before");
        if (of.rank() == 0) counts = fake()->counts();
        of.barrier(call, "the count");
      };
      count(before, 1);
      gpu.client.step(1);
      count(after, 2);
      // No message carries bytes that ranks have in memory that they share.
      EXPECT_TRUE(stage == 0 && !gpus_meet ? received >= gpu.made.plan.step_bytes_received
                                           : received < 64u << 10)
          << received;
      in += gpu.made.plan.step_bytes_in;
      out += gpu.made.plan.step_bytes_out;
      for (ParameterId p = 0; p < gpu.engine.layout().parameters(); ++p)
        out += all.micro_batches * gpu.client.bytes(p);
    });
    // The plan counts fetches as if nothing of a unit were still there, and likewise gradients of small units
    // that were summed in backward.
    const std::uint64_t came = after.bytes_in - before.bytes_in;
    const bool all_leave = stage < 2 || gradients == kDevice;
    EXPECT_TRUE(parameters == kDevice && all_leave ? came == in : came <= in) << came << ", planned " << in;
    // Of what GPUs read of each other only squares leave.
    const std::uint64_t left = after.bytes_out - before.bytes_out;
    const bool squares_leave = (gpus_meet && (gradients == kDevice || stage >= 2)) || all.each_backward;
    const std::uint64_t squares = squares_leave ? all.micro_batches * (64u << 10) : 0;
    EXPECT_TRUE((left >= out || !all_leave) && left <= out + squares) << left << ", planned " << out;
  }
}

// A GPU updates a shard of parameters only where that is in its own memory too. So no plan has the state of
// shards on GPUs that do not read each other's memory, or that have too little of it for all shards.
TEST_F(RanksOnGpusTest, StateThatIsToBeOnGpusIsWithShardsThereOrRefused) {
  Case setup;
  setup.blocks = 9, setup.rows = 2000;
  setup.stage = 3;
  setup.places[index(Part::kState)] = kDevice;
  setup.ranks = {0, 2};
  expect_error(ErrorCode::kInvalidArgument,
               {"optimizer state on the GPU is asked for", "GPUs do not read each other's memory",
                "leave the state in memory or on disk, or ask for stage 1"},
               [&] { plan_of(setup); });
  setup.ranks.gpus_meet = true;
  std::size_t planned = 0, refused = 0;
  for (setup.device = 64 * kMiB; setup.device < kGiB; setup.device += 64 * kMiB) {
    try {
      const Plan plan = plan_of(setup);
      EXPECT_TRUE(std::ranges::none_of(plan.units, &UnitPlan::updated_by_cpu));
      EXPECT_EQ(plan.shard_place(), ShardPlace::kGpu);
      ++planned;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kBudget) << error.what();
      EXPECT_THAT(error.what(), testing::HasSubstr("optimizer state there, as asked"));
      EXPECT_THAT(error.what(), testing::HasSubstr("or ask for another place of optimizer state"));
      EXPECT_EQ(planned, 0u) << "less memory was enough";
      ++refused;
    }
  }
  EXPECT_TRUE(planned > 0 && refused > 0) << planned << ' ' << refused;
}

// Where all that ranks exchange in a step passes between their GPUs. device_shards_test.cc counts what a
// fetch reads, of which a GPU with more memory than it needs has fewer than a plan says.
TEST_F(RanksOnGpusTest, WhatGpusReadOfEachOtherInAStepIsPlannedToTheByte) {
  SLUICE_NEEDS_THE_FAKE();
  constexpr int kRanks = 3;
  struct Read {
    std::size_t stage;
    allocator::Tier updates;
    Dtype type;
    std::size_t micro_batches = 1;
  };
  for (const auto& [stage, updates, type, micro_batches] :
       {Read{0, kDevice, Dtype::kBf16}, Read{1, kDevice, Dtype::kF32}, Read{1, kDevice, Dtype::kBf16, 2},
        Read{2, kDevice, Dtype::kBf16}, Read{3, kDevice, Dtype::kF32}, Read{3, kDevice, Dtype::kBf16, 2},
        Read{3, kHost, Dtype::kBf16}}) {
    SCOPED_TRACE(fmt::format("{}, stage {}, updates by the {}", name_of(type), stage, name_of(updates)));
    Case all;
    if (type != Dtype::kF32) all.optimizer = optimizer_of("adamw", Dtype::kF32, true);
    all.dtype = type;
    all.once = micro_batches == 1;
    all.micro_batches = micro_batches;
    all.ends = stage >= 2 || micro_batches > 1;
    all.device = 256 * kMiB;
    all.stage = stage;
    all.updates = updates;
    all.places = {kDevice, updates, updates};
    all.ranks.gpus_meet = true;
    begin_devices(kRanks, Schedule::kRandom, 7);
    comm::run_communicators(comm::World::kThreads, kRanks, [&](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_for(of);
      OnGpu gpu(of_rank(all, of), *device, &of);
      EXPECT_EQ(gpu.made.plan.shard_place(), shards_of(all));
      const auto read = [&] {
        gpu.engine.settle();
        of.barrier(1, "the step before");
        const fake_cuda::Counts::OfDevice counts = fake()->counts().of_devices[of.rank()];
        of.barrier(1, "the count");
        return counts.bytes_added + (stage < 3 ? counts.bytes_copied : 0);
      };
      gpu.client.load();
      gpu.client.step(0);
      const std::uint64_t before = read();
      gpu.client.step(1);
      EXPECT_EQ(gpu.made.plan.partitions_any(Part::kParameters), stage == 3);
      const std::uint64_t copied = stage < 3 ? 0 : planned_copies(gpu);
      EXPECT_EQ(read() - before, gpu.made.plan.step_bytes_received - copied) << "rank " << of.rank();
    });
  }
}

// Then shards are sent, through memory that no plan has for that.
TEST_F(RanksOnGpusTest, HaveTheBitsOfTheCpusWhereTheirMemoryCannotBeShared) {
  SLUICE_NEEDS_THE_FAKE();
  Case setup;
  setup.optimizer = optimizer_of("adamw", Dtype::kF32, true);
  setup.dtype = Dtype::kBf16, setup.once = true;
  setup.blocks = 9, setup.rows = 300;
  setup.stage = 3;
  setup.device = 224 * kMiB;
  expect_bits_of_cpus_without_shared_memory(setup, [](const OnGpu& gpu, comm::Communicator& of) {
    EXPECT_TRUE(gpu.made.plan.partitions_any(Part::kParameters));
    EXPECT_GT(of.counters().received, gpu.made.plan.step_bytes_received);
  });
}

// A unit that waits in the host on one rank is summed there by all.
TEST_F(RanksOnGpusTest, RanksAgreeOnWhereEachUnitMeets) {
  Case setup;
  setup.blocks = 4;
  setup.stage = 1;
  const Outcomes expected = train_on_cpus(setup, 3);
  setup.device = 192 * kMiB;
  setup.ranks.gpus_meet = true;
  begin_devices(3, Schedule::kRandom, 5);
  const Outcomes found = train(3, [&](comm::Communicator& of) {
    const std::unique_ptr<Device> device = open_for(of);
    Case own = of_rank(setup, of);
    own.updates = of.rank() == 2 ? kDevice : kHost;
    own.places = {of.rank() == 1 ? kHost : kDevice, of.rank() == 0 ? kDevice : kHost,
                  of.rank() == 2 ? kDevice : kHost};
    return train_on_gpu(
        own, *device, [](Made& made) { check_memory(made); }, &of);
  });
  EXPECT_TRUE(found == expected);
}

// A client that looks at units between backward and the step copies shards late.
TEST_F(RanksOnGpusTest, ShardsOnGpusChangeWhenAllHaveCopiedWhatTheClientLooksAt) {
  Case setup;
  setup.ends = setup.once = setup.looks = true;
  setup.blocks = 5, setup.rows = 300, setup.steps = 3;
  setup.device = 256 * kMiB;
  for (const bool clip : {true, false}) {
    setup.clip = clip;
    expect_bits_of_cpus(setup, 2, {3, kDevice, kDevice, kDevice, kDevice, true}, Schedule::kLate, 1);
  }
}

// Its step has ended before the CPU has updated its shards.
TEST_F(RanksOnGpusTest, ShardsAreUpdatedWhileTheirRankMakesNoCalls) {
  for (const bool gpus_meet : {false, true})
    for (const bool clip : {false, true}) {
      SCOPED_TRACE(
          fmt::format("GPUs {}, {}", gpus_meet ? "meet" : "do not meet", clip ? "clipped" : "at once"));
      Case all;
      all.ends = all.once = true;
      all.clip = clip;
      all.blocks = 9, all.rows = 300;
      all.stage = 3;
      all.device = 256 * kMiB;
      all.updates = kHost;
      all.places = {kDevice, kHost, kDisk};
      all.disk_microseconds = 20'000;
      all.ranks.gpus_meet = gpus_meet;
      begin_devices(2, Schedule::kRandom, 1);
      train(2, [&](comm::Communicator& of) {
        const std::unique_ptr<Device> device = open_for(of);
        OnGpu gpu(of_rank(all, of), *device, &of);
        EXPECT_EQ(gpu.made.plan.shard_place(), shards_of(all));
        gpu.client.load();
        gpu.client.step(0);
        for (UnitId unit = 0; of.rank() == 1 && unit < gpu.engine.layout().units().size(); ++unit) {
          gpu.engine.acquire(unit, Hold::kRead);
          gpu.engine.release(unit);
        }
        of.barrier(2, "the look");
        return Outcome{};
      });
      if (HasFailure()) return;
    }
}

// Rank 1 has shards on its GPU. Rank 0 has them elsewhere, or has chosen stage 1 and goes along as far as it
// is asked to.
TEST_F(RanksOnGpusTest, RanksAgreeOnWhereShardsLie) {
  struct Rank0 {
    std::size_t stage;
    ShardPlace has;  // at stage 3
    std::optional<allocator::Tier> updates, parameters;
    bool meets;
    ShardPlace expected;
  };
  for (const Rank0& rank :
       {Rank0{3, ShardPlace::kHost, {}, {}, true, ShardPlace::kHost},
        Rank0{3, ShardPlace::kPassed, {}, {}, true, ShardPlace::kPassed},
        Rank0{1, {}, kDevice, {}, true, ShardPlace::kGpu}, Rank0{1, {}, {}, {}, true, ShardPlace::kHost},
        Rank0{1, {}, kHost, {}, true, ShardPlace::kHost}, Rank0{1, {}, {}, kDisk, true, ShardPlace::kHost},
        Rank0{1, {}, kDevice, {}, false, ShardPlace::kHost}})
    comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& of) {
      Plan plan;
      plan.units.resize(1);
      plan.ranks.gpus_meet = rank.meets || of.rank() == 1;
      UnitPlan& unit = plan.units[0];
      unit.compute = unit.updated_on = kDevice;
      PlanRequest request;
      request.ranks.gpus_meet = true;
      request.chooses_links = true;
      unit.stage = 3;
      if (of.rank() == 0) {
        unit.stage = rank.stage;
        if (unit.stage == 3) unit.updated_on = kHost;
        plan.passing_places = rank.has == ShardPlace::kPassed ? 1 : 0;
        request.updates = rank.updates;
        request.places[index(Part::kParameters)] = rank.parameters;
      }
      if (unit.stage == 3) unit.place(Part::kParameters, allocator::Tier::kRanks);
      const bool has_it = unit.stage == 3 && plan.shard_place() == rank.expected;
      EXPECT_EQ(agree_on_plan(of, plan, request), !has_it);
      EXPECT_EQ(request.stages, std::vector<std::size_t>{3});
      EXPECT_EQ(request.shards, rank.expected);
    });
}

// Rank 0 would have no shards by itself.
TEST_F(RanksOnGpusTest, ShardsAreOnGpusThatUpdateWhereTheirStageIsThatOfAnotherRank) {
  Case all;
  all.blocks = 9, all.rows = 2000;
  all.device = 4 * kGiB;
  all.updates = kDevice;
  all.ranks.gpus_meet = true;
  comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& of) {
    const Case setup = of_rank(all, of);
    PlanRequest request = request_of(setup);
    request.stage = of.rank() == 0 ? std::nullopt : std::optional<std::size_t>(3);
    const auto plan = [&] {
      return make_plan(profile_of(setup), *optim::make_optimizer(setup.optimizer), budget_of(setup), request,
                       setup.rates);
    };
    const Plan chosen = plan();
    EXPECT_EQ(chosen.partitions_any(Part::kParameters), of.rank() == 1);
    agree_on_plan(of, chosen, request);
    const Plan agreed = plan();
    EXPECT_EQ(agreed.shard_place(), ShardPlace::kGpu);
    EXPECT_TRUE(std::ranges::none_of(agreed.units, &UnitPlan::updated_by_cpu));
  });
}

// One rank's plan has the host's memory; or the other one asks for GPUs that meet, or fits with no other.
TEST_F(RanksOnGpusTest, RanksAgreeOnWhatJoinsTheirGpus) {
  for (const auto& [asks, fits] : {std::pair{false, true}, {true, true}, {false, false}})
    comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& of) {
      Plan plan;
      plan.units.resize(1);
      plan.ranks.gpus_meet = of.rank() == 1;
      plan.needs_gpus_to_meet = of.rank() == 1 && !fits;
      PlanRequest request;
      request.ranks.gpus_meet = true;
      request.chooses_links = of.rank() == 0 || !asks;
      const bool meet = asks || !fits;
      EXPECT_EQ(agree_on_plan(of, plan, request), meet == (of.rank() == 0));
      EXPECT_EQ(request.ranks.gpus_meet, meet);
      EXPECT_FALSE(request.chooses_links) << "what they agree on is chosen again";
    });
}

// In a steady order nothing is mapped after two steps. The threads that exchange pieces wait for these alone,
// and tell the caller the norm.
TEST_F(RanksOnGpusTest, ASteadyStepMapsNothingAndItsCallerWaitsForNoGpu) {
  SLUICE_NEEDS_THE_FAKE();
  constexpr int kSteady = 3;
  const auto maps = [](const std::string& function) {
    return function.starts_with("cuMem") && !function.starts_with("cuMemcpy") &&
           !function.starts_with("cuMemset") && function != "cuMemGetInfo";
  };
  for (const auto& [stage, updates] : {std::pair<std::size_t, allocator::Tier>{0, kDevice},
                                       {1, kHost},
                                       {2, kDevice},
                                       {3, kDevice},
                                       {3, kHost}}) {
    SCOPED_TRACE(fmt::format("stage {}, updates by the {}", stage, name_of(updates)));
    Case all;
    all.ends = all.once = true;
    all.blocks = 5, all.steps = kSteady + 2;
    all.stage = stage;
    all.device = 256 * kMiB;
    all.updates = updates;
    all.places = {kHost, updates, updates};
    all.ranks.gpus_meet = true;
    begin_devices(2, Schedule::kLate, 1);
    comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_for(of);
      OnGpu gpu(of_rank(all, of), *device, &of);
      EXPECT_TRUE(gpu.made.plan.ranks.gpus_meet);
      EXPECT_EQ(gpu.made.plan.shard_place(), shards_of(all));
      gpu.client.load();
      for (int step = 0; step < all.steps; ++step) {
        fake_cuda::Counts before = fake()->counts();
        gpu.client.step(0);  // which has the same order each time
        fake_cuda::Counts after = fake()->counts();
        const auto me = std::this_thread::get_id();
        auto& calls = after.of_devices[of.rank()].calls;
        for (const auto& [function, count] : before.of_devices[of.rank()].calls) calls[function] -= count;
        EXPECT_GT(calls["cuEventRecord"], 0u) << "the counts of another device";
        EXPECT_GT(before.of_devices[of.rank()].calls["cuMemMap"], 0u);
        for (const auto& [function, count] : calls) {
          if (step >= kSteady && (maps(function) || function == "cuStreamSynchronize")) {
            EXPECT_EQ(count, 0u) << function << ", rank " << of.rank() << ", step " << step;
          }
        }
        if (step >= kSteady) {
          EXPECT_EQ(after.waits[me] - before.waits[me], 0u) << "rank " << of.rank() << ", step " << step;
        }
      }
      of.barrier(1, "the end of a test");
    });
  }
}

// None of them meet where some cannot: two of four pairs do, or one rank may pass no descriptors.
TEST_F(RanksOnGpusTest, WhyGpusDoNotMeetIsSaidOnceAndSoon) {
  SLUICE_NEEDS_THE_FAKE();
  struct Machine {
    int ranks, peers;
    bool forbids;
    const char* why;
  };
  for (const auto& [ranks, peers, forbids, why] :
       {Machine{2, 1, false, "rank 0: .*PEER_ACCESS_UNSUPPORTED"},
        Machine{4, 2, false, "rank 0: .*PEER_ACCESS_UNSUPPORTED"},
        Machine{3, 3, true, "rank 1: sendmsg: Operation not permitted"}}) {
    SCOPED_TRACE(why);
    device_.reset();
    fake()->begin({.devices = ranks, .peers = peers});
    testing::internal::CaptureStderr();
    const auto begin = std::chrono::steady_clock::now();
    comm::run_communicators(comm::World::kThreads, ranks, [&, forbids = forbids](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_for(of);
      if (forbids && of.rank() == 1) test::forbid_call(SYS_sendmsg);
      const BetweenGpus found = measure_reads_between_gpus(of, *device, 64 * kMiB, "");
      EXPECT_EQ(found.bytes_a_second, 0);
      EXPECT_NE(found.problem, "");
    });
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    const std::string log = testing::internal::GetCapturedStderr();
    const std::string said = "GPUs read nothing of each other's memory: ";
    EXPECT_THAT(log, testing::ContainsRegex(said + why));
    EXPECT_EQ(log.find(said), log.rfind(said)) << "the same on each rank: " << log;
  }
}

TEST_F(RanksOnGpusTest, NothingIsSaidOfLinksThatRank0DoesNotWant) {
  SLUICE_NEEDS_THE_FAKE();
  device_.reset();
  fake()->begin({.devices = 2});
  for (const bool by_rank_0 : {true, false}) {
    testing::internal::CaptureStderr();
    comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_for(of);
      const bool wants_others = (of.rank() == 0) == by_rank_0;
      const BetweenGpus found =
          measure_reads_between_gpus(of, *device, 64 * kMiB, wants_others ? "options.links is 'nccl'" : "");
      EXPECT_NE(found.problem, "");
    });
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_EQ(log.find("GPUs read nothing") == std::string::npos, by_rank_0) << log;
  }
}

// The ranks of which a GPU is well end with the same error, soon, wherever they wait.
TEST_F(RanksOnGpusTest, AGpuThatFailsEndsAllRanks) {
  SLUICE_NEEDS_THE_FAKE();
  struct Failing {
    std::size_t stage;
    allocator::Tier updates;
    bool gpus_meet;
    int result;
    const char* cause;
    std::uint64_t calls;  // before it fails
    bool by_nccl = false;
  };
  using Clock = std::chrono::steady_clock;
  for (const auto& [stage, updates, gpus_meet, result, cause, calls, by_nccl] :
       {Failing{0, kDevice, false, 719, "CUDA_ERROR_LAUNCH_FAILED", 0},
        Failing{0, kDevice, true, 214, "CUDA_ERROR_ECC_UNCORRECTABLE", 150},
        Failing{1, kHost, false, 46, "CUDA_ERROR_DEVICE_UNAVAILABLE", 600},
        Failing{1, kDevice, true, 2, "CUDA_ERROR_OUT_OF_MEMORY", 0},
        Failing{3, kHost, false, 214, "CUDA_ERROR_ECC_UNCORRECTABLE", 600},
        Failing{3, kHost, true, 719, "CUDA_ERROR_LAUNCH_FAILED", 150},
        Failing{3, kDevice, true, 46, "CUDA_ERROR_DEVICE_UNAVAILABLE", 600},
        Failing{1, kDevice, true, 719, "CUDA_ERROR_LAUNCH_FAILED", 150, true},
        Failing{0, kDevice, true, 214, "CUDA_ERROR_ECC_UNCORRECTABLE", 600, true}}) {
    SCOPED_TRACE(fmt::format("stage {}, updates by the {}, GPUs {}, {} after {} calls", stage,
                             name_of(updates),
                             by_nccl     ? "meet by NCCL"
                             : gpus_meet ? "meet"
                                         : "do not meet",
                             cause, calls));
    Case all;
    all.ends = all.once = true;
    all.blocks = 5, all.steps = 4;
    all.stage = stage;
    all.device = 192 * kMiB;
    all.updates = updates;
    all.places = {kDevice, updates, updates};
    all.ranks.gpus_meet = gpus_meet;
    all.ranks.by_nccl = by_nccl;
    begin_devices(2, Schedule::kRandom, calls);
    std::array<std::string, 2> errors;
    std::array<Clock::time_point, 2> ends;
    comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& of) {
      const auto rank = static_cast<std::size_t>(of.rank());
      const std::unique_ptr<Device> device = open_for(of);
      OnGpu gpu(of_rank(all, of), *device, &of);
      EXPECT_EQ(gpu.made.plan.shard_place(), shards_of(all));
      gpu.client.load();
      if (rank == 1) fake()->fail_device(1, calls, result);
      try {
        for (int step = 0; step < all.steps; ++step) gpu.client.step(step);
      } catch (const Error& error) {
        errors[rank] = error.what();
        ends[rank] = Clock::now();
        of.fail(error.what());
        if (rank == 1) fake()->fail_device(1, 0, 0);
      }
    });
    EXPECT_THAT(errors[1], testing::HasSubstr("GPU 1 (0000:1c:00.0): cu"));
    for (const char* part : {"rank 1 has failed", "GPU 1 (0000:1c:00.0): cu", cause})
      EXPECT_THAT(errors[0], testing::HasSubstr(part));
    EXPECT_LT(ends[0] - ends[1], std::chrono::seconds(2));
    EXPECT_EQ(fake()->alive(), std::vector<std::string>{});
    EXPECT_EQ(fake()->take_misuses(), std::vector<std::string>{});
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, KindsOfRanksOnGpus,
                         testing::Values(Kind{"adamw", Dtype::kF32, Dtype::kF32, 2, 0},
                                         Kind{"adamw", Dtype::kBf16, Dtype::kU8, 2, 1},
                                         Kind{"sgd", Dtype::kF16, Dtype::kF32, 2, 2},
                                         Kind{"adafactor", Dtype::kBf16, Dtype::kF32, 2, 3}));
INSTANTIATE_TEST_SUITE_P(Long, KindsOfRanksOnGpus,
                         testing::Values(Kind{"lion", Dtype::kF32, Dtype::kBf16, 4, 4},
                                         Kind{"adafactor", Dtype::kF32, Dtype::kF32, 3, 5},
                                         Kind{"adamw", Dtype::kF32, Dtype::kF32, 5, 6},
                                         Kind{"lion", Dtype::kBf16, Dtype::kF32, 7, 8},
                                         Kind{"adamw", Dtype::kBf16, Dtype::kU8, 8, 7}));

}  // namespace ranks_test
}  // namespace sluice::engine::twins
