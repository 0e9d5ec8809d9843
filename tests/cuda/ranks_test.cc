#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "comm/forbidden.h"
#include "comm/worlds.h"
#include "cuda/engine_fixture.h"
#include "cuda/file_limit.h"
#include "engine/machine/peer_rate.h"
#include "engine/memory/device_shards.h"
#include "engine/ranks/agreement.h"
#include "thrown.h"

// Ranks that compute on GPUs, each on one of its own, beside as many that compute on the CPU.
namespace sluice::engine::twins {
namespace ranks_test {

// What is partitioned, what updates, where parameters, gradients and state are, and what joins the GPUs.
struct Placed {
  std::size_t stage;
  allocator::Tier updates, parameters, gradients, state;
  bool gpus_meet = false;
  Dtype dtype = Dtype::kF32;
};

class RanksOnGpusTest : public DeviceEngineTest {
 protected:
  static std::string text(const Placed& p) {
    return fmt::format("{}, stage {}, updates by the {}, {} {} {}, GPUs {}", name_of(p.dtype), p.stage,
                       name_of(p.updates), name_of(p.parameters), name_of(p.gradients), name_of(p.state),
                       p.gpus_meet ? "meet" : "do not meet");
  }
  static Case placed(Case setup, const Placed& p) {
    setup.dtype = p.dtype;
    if (setup.optimizer.name == Case().optimizer.name && p.dtype != Dtype::kF32)
      setup.optimizer = optimizer_of("adamw", Dtype::kF32, true);
    setup.stage = p.stage;
    setup.updates = p.updates;
    setup.places = {p.parameters, p.gradients, p.state};
    setup.ranks.gpus_meet = p.gpus_meet;
    return setup;
  }
  // Ranks have the bits of as many on the CPU. setup.device is the budget of a GPU's memory.
  void expect_bits_of_cpus(const Case& setup, int ranks, const Placed& p, Schedule schedule,
                           std::uint64_t seed, const std::function<void(const Made&)>& look = {}) {
    SCOPED_TRACE(text(p));
    const Case on_gpus = placed(setup, p);
    Case on_cpus = on_gpus;
    on_cpus.device = 0, on_cpus.places = {}, on_cpus.updates = {}, on_cpus.ranks = {};
    const Outcomes expected = train_on_cpus(on_cpus, ranks);
    begin_devices(ranks, schedule, seed);
    expect_twins(on_gpus, expected, look);
  }
  // By rank.
  using Outcomes = std::vector<Outcome>;
  Outcomes train(int ranks, const std::function<Outcome(comm::Communicator& of)>& of_rank) {
    Outcomes outcomes(static_cast<std::size_t>(ranks));
    comm::run_communicators(world_, ranks, [&](comm::Communicator& communicator) {
      try {
        outcomes[static_cast<std::size_t>(communicator.rank())] = of_rank(communicator);
        communicator.barrier(1, "the end of a test");
      } catch (const std::exception& error) {
        communicator.fail(error.what());
        throw;
      }
    });
    return outcomes;
  }
  static std::unique_ptr<Device> open_for(const comm::Communicator& of) {
    return open_device(fake() != nullptr ? of.rank() : 0);
  }
  static Case of_rank(Case setup, const comm::Communicator& communicator) {
    const bool gpus_meet = setup.ranks.gpus_meet;
    setup.ranks = {communicator.rank(), communicator.size()};
    setup.ranks.gpus_meet = gpus_meet;
    for (int rank = 0; rank < communicator.size(); ++rank)
      setup.ranks.hosts.push_back(communicator.hosts().first_of(rank));
    return setup;
  }
  Outcomes train_on_cpus(const Case& setup, int ranks) {
    return train(ranks, [&](comm::Communicator& of) { return train_on_cpu(of_rank(setup, of), &of); });
  }
  static ShardPlace shards_of(const Case& setup) {
    if (setup.stage != 3 || !setup.ranks.gpus_meet) return ShardPlace::kHost;
    return setup.updates == kDevice ? ShardPlace::kGpu : ShardPlace::kPassed;
  }
  Outcomes train_on_gpus(const Case& setup, int ranks, const std::function<void(const Made&)>& also) {
    return train(ranks, [&](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_for(of);
      const auto look = [&](Made& made) {
        if (also) also(made);
        EXPECT_EQ(made.plan.partitions_any(Part::kParameters), setup.stage == 3);
        EXPECT_EQ(made.plan.shard_place(), shards_of(setup));
        EXPECT_EQ(std::ranges::count(made.plan.partitions_state(), true) > 0, setup.stage > 0);
        if (!setup.keeps) check_memory(made);
      };
      return train_on_gpu(of_rank(setup, of), *device, look, &of);
    });
  }
  void expect_twins(const Case& setup, const Outcomes& expected,
                    const std::function<void(const Made&)>& look = {}) {
    const Outcomes found = train_on_gpus(setup, static_cast<int>(expected.size()), look);
    for (std::size_t rank = 0; rank < expected.size(); ++rank) {
      EXPECT_EQ(found[rank].norms, expected[rank].norms) << "rank " << rank;
      EXPECT_TRUE(found[rank].seen == expected[rank].seen) << "rank " << rank << " saw other parameters";
      EXPECT_TRUE(found[rank] == expected[rank]) << "rank " << rank << " has other parameters or state";
    }
  }
  // What a plan says that a rank's GPU copies of others at stage 3: the last unit is still there in backward,
  // and small ones are gathered once.
  static std::uint64_t planned_copies(const OnGpu& gpu) {
    const Layout& layout = gpu.engine.layout();
    const RankOf& ranks = gpu.made.plan.ranks;
    const Shards shards(layout, *gpu.made.optimizer, kChunkGrain, Shards::of(ranks.rank, ranks.size, {}));
    const UnitId last = layout.units().size() - 1;
    std::uint64_t bytes = 0;
    for (UnitId unit = 0; unit <= last; ++unit) {
      const bool in_shards = gpu.made.plan.units[unit].tier(Part::kParameters) == allocator::Tier::kRanks;
      const std::size_t fetches = gpu.made.profile.micro_batches * (unit < last ? 2 : 1);
      const std::size_t of_others = layout.unit_elements(unit) - shards.here(unit).size();
      bytes += (in_shards                ? fetches
                : layout.trainable(unit) ? 1
                                         : 0) *
               of_others * size_of(layout.dtype(unit));
    }
    return bytes;
  }
  // Ranks of one host read each other's pieces; those of several send them.
  comm::World world_ = comm::World::kThreads;
  // Several devices of a fake driver that begins anew.
  void begin_devices(int devices, Schedule schedule, std::uint64_t seed) {
    if (fake() == nullptr) return;
    device_.reset();
    fake()->begin({.schedule = schedule, .seed = seed, .memory = kGiB, .devices = devices});
  }
};

// What the bits depend on, and with which of the ways of the test below it begins.
struct Kind {
  const char* optimizer;
  Dtype dtype, state;
  int ranks;
  std::uint64_t first;
};

class KindsOfRanksOnGpus : public RanksOnGpusTest, public testing::WithParamInterface<Kind> {};

// Kinds together have each stage with clipping and without, where the GPUs meet and where the host joins
// them.
TEST_P(KindsOfRanksOnGpus, HaveTheBitsOfTheCpusWhereverPartsAre) {
  const auto& [name, dtype, state, ranks, first] = GetParam();
  Case setup;
  setup.optimizer = optimizer_of(name, state, true);
  setup.dtype = dtype;
  setup.micro_batches = 2, setup.blocks = 2;
  const bool by_gpu = std::string(name) != "adafactor";
  const std::array tiers = {kDevice, kHost, kDisk};
  std::uint64_t seed = first;
  for (const std::size_t stage : {0, 1, 3}) {  // with several micro-batches 2 is as 1
    setup.stage = stage;
    setup.clip = (stage + first) % 2 == 0;
    setup.device = 0;
    setup.places = {};
    setup.ranks.gpus_meet = false;
    const Outcomes expected = train_on_cpus(setup, ranks);
    setup.device = 192 * kMiB;
    for (const auto updates : {kDevice, kHost}) {
      if (updates == kDevice && !by_gpu) continue;
      ++seed;
      setup.updates = updates;
      setup.places = {tiers[seed % 3], tiers[seed / 2 % 3],
                      updates == kDevice ? tiers[(seed + 1) % 3] : tiers[1 + seed % 2]};
      setup.ranks.gpus_meet = seed % 2 == 1 || (stage == 3 && updates == kDevice);
      SCOPED_TRACE(fmt::format(
          "stage {}, {}, updates by the {}, {} {} {}", setup.stage, setup.clip ? "clipped" : "at once",
          name_of(updates), name_of(*setup.places[0]), name_of(*setup.places[1]), name_of(*setup.places[2])));
      begin_devices(ranks, static_cast<Schedule>(seed % 3), seed);
      world_ = seed % 4 == 0 && !setup.ranks.gpus_meet ? comm::World::kMixedHosts : comm::World::kThreads;
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
    const auto [stage, updates, parameters, gradients, state, gpus_meet, type] = where;
    if (number++ / 2 % 2 == 1) where.dtype = Dtype::kBf16;
    SCOPED_TRACE(text(where));
    Case all;
    all.once = true;
    all.device = 128 * kMiB;
    all.ends = stage >= 2;
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
      // What ranks have in memory that they share, no message carries.
      EXPECT_TRUE(stage == 0 && !gpus_meet ? received >= gpu.made.plan.step_bytes_received
                                           : received < 64u << 10)
          << received;
      in += gpu.made.plan.step_bytes_in;
      out += gpu.made.plan.step_bytes_out;
      for (ParameterId p = 0; p < gpu.engine.layout().parameters(); ++p) out += gpu.client.bytes(p);
    });
    // What is fetched is planned as if nothing of a unit were still there, and so are gradients of small
    // units that were summed in backward.
    const std::uint64_t came = after.bytes_in - before.bytes_in;
    const bool all_leave = stage < 2 || gradients == kDevice;
    EXPECT_TRUE(parameters == kDevice && all_leave ? came == in : came <= in) << came << ", planned " << in;
    // Of what GPUs read of each other only squares leave.
    const std::uint64_t left = after.bytes_out - before.bytes_out;
    const std::uint64_t squares = gpus_meet && (gradients == kDevice || stage >= 2) ? 64u << 10 : 0;
    EXPECT_TRUE((left >= out || !all_leave) && left <= out + squares) << left << ", planned " << out;
  }
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

// A unit of one piece and a part of another, whose narrow gradients become f32 in their own memory: in frames
// or in a record.
TEST_F(RanksOnGpusTest, NarrowGradientsBecomeSumsWhereTheyAre) {
  Case setup;
  setup.optimizer = optimizer_of("adamw", Dtype::kBf16, false);
  setup.once = setup.ends = true;
  setup.blocks = 1;
  setup.device = kGiB;
  setup.rows = 4400;
  expect_bits_of_cpus(setup, 2, {1, kHost, kDevice, kHost, kHost, false, Dtype::kBf16}, Schedule::kLate, 1);
  setup.rows = 8600;
  expect_bits_of_cpus(setup, 2, {1, kDevice, kDevice, kDevice, kDevice, true, Dtype::kBf16}, Schedule::kLate,
                      1);
}

// Then shards are sent, through memory that no plan has for that.
TEST_F(RanksOnGpusTest, HaveTheBitsOfTheCpusWhereTheirMemoryCannotBeShared) {
  SLUICE_NEEDS_THE_FAKE();
  Case setup;
  setup.optimizer = optimizer_of("adamw", Dtype::kF32, true);
  setup.dtype = Dtype::kBf16, setup.once = true;
  setup.blocks = 9, setup.rows = 300;
  setup.stage = 3;
  const Outcomes expected = train_on_cpus(setup, 2);
  setup.device = 224 * kMiB;
  begin_devices(2, Schedule::kRandom, 1);
  FileLimit limit;
  const Outcomes found = train(2, [&](comm::Communicator& of) {
    const std::unique_ptr<Device> device = open_device(of.rank());
    const Case own = of_rank(setup, of);
    OnGpu gpu(own, *device, &of);
    gpu.made.ledger.set_budget(kHost, gpu.made.plan.peak_memory + DeviceShards::bytes());
    EXPECT_TRUE(gpu.made.plan.partitions_any(Part::kParameters));
    of.barrier(1, "all engines");
    if (of.rank() == 0) limit.set(0);
    of.barrier(1, "the limit");
    gpu.client.load();
    of.barrier(1, "all values");
    if (of.rank() == 0) limit.reset();
    Outcome outcome = trained(own, gpu.client);
    EXPECT_GT(of.counters().received, gpu.made.plan.step_bytes_received);
    return outcome;
  });
  EXPECT_EQ(found, expected);
}

// The client reads and keeps gradients that were summed in the place of narrow ones, and adds to them.
TEST_F(RanksOnGpusTest, SumsInThePlaceOfNarrowGradientsAreThereToBeRead) {
  Case setup;
  setup.once = setup.ends = setup.measures = true;
  setup.edits = setup.keeps = true;
  setup.steps = 3;
  setup.device = 192 * kMiB;
  for (const auto& [by, gradients, gpus_meet] : {std::tuple{kDevice, kHost, false},
                                                 {kHost, kHost, false},
                                                 {kDevice, kDevice, true},
                                                 {kHost, kHost, true}})
    expect_bits_of_cpus(setup, 2, {1, by, kDevice, gradients, by, gpus_meet, Dtype::kBf16}, Schedule::kLate,
                        1);
}

// Where a step ends with the updates, sums go on beside backward, in an order on which ranks agree.
TEST_F(RanksOnGpusTest, SumsBesideBackwardHaveTheBitsOfTheCpus) {
  std::uint64_t seed = 0;
  for (const Placed& p : {Placed{0, kHost, kHost, kHost, kHost, false, Dtype::kBf16},
                          Placed{1, kDevice, kHost, kDevice, kDevice}, Placed{1, kHost, kHost, kHost, kHost},
                          Placed{0, kHost, kHost, kDisk, kHost},
                          Placed{0, kDevice, kHost, kDevice, kDevice, true, Dtype::kBf16},
                          Placed{1, kDevice, kHost, kDisk, kDevice, true},
                          Placed{3, kHost, kHost, kDevice, kHost, true, Dtype::kBf16},
                          Placed{3, kDevice, kHost, kHost, kDevice, true}}) {
    Case setup;
    setup.ends = true, setup.once = p.dtype == Dtype::kBf16;
    setup.blocks = 5, setup.steps = 3;
    setup.micro_batches = 1 + seed % 2;
    setup.device = 192 * kMiB;
    world_ = seed == 2 ? comm::World::kMixedHosts : comm::World::kThreads;
    expect_bits_of_cpus(setup, 2, p, static_cast<Schedule>(seed % 3), seed);
    ++seed;
  }
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

// Of gradients that were summed in backward a rank keeps its own part alone, until the step's end.
TEST_F(RanksOnGpusTest, KeepTheirOwnPartsOfGradients) {
  std::uint64_t seed = 0;
  for (const Placed& p : {Placed{2, kDevice, kDevice, kDevice, kDevice, true},
                          Placed{2, kDevice, kDevice, kHost, kDevice, false, Dtype::kBf16},
                          Placed{2, kHost, kDevice, kHost, kHost, true, Dtype::kBf16},
                          Placed{3, kDevice, kDevice, kDevice, kDevice, true, Dtype::kBf16},
                          Placed{3, kDevice, kDevice, kHost, kDisk, true},
                          Placed{3, kHost, kDevice, kHost, kHost, true, Dtype::kBf16}}) {
    Case setup;
    if (seed == 2) setup.optimizer = optimizer_of("adafactor", Dtype::kF32, true);
    setup.ends = setup.once = setup.measures = true;
    setup.blocks = 5, setup.rows = 300, setup.steps = 3;
    setup.edits = setup.parts = p.stage == 3;
    setup.device = 256 * kMiB;
    const auto look = [&](const Made& made) {
      EXPECT_TRUE(made.plan.sums_in_backward);
      EXPECT_GE(std::ranges::count(made.plan.units, true, &UnitPlan::gradient_in_shards), 5);
      EXPECT_EQ(std::ranges::count(made.plan.units, true, &UnitPlan::gradient_shard_in_host) > 0,
                p.gradients == kHost);
    };
    expect_bits_of_cpus(setup, 2 + static_cast<int>(seed % 2), p, static_cast<Schedule>(seed % 3), seed,
                        look);
    ++seed;
  }
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

// A rank keeps its part of a gradient in memory alone.
TEST_F(RanksOnGpusTest, GradientsStayWholeAtStage3WhereTheyAreToBeOnDisk) {
  Case setup;
  setup.ends = setup.once = true;
  setup.blocks = 2;
  setup.device = 192 * kMiB;
  expect_bits_of_cpus(setup, 2, {3, kHost, kDevice, kDisk, kHost}, Schedule::kRandom, 1,
                      [](const Made& made) {
                        EXPECT_FALSE(made.plan.sums_in_backward);
                        EXPECT_GT(made.plan.disk_bytes, 0u);
                      });
}

// One has chosen stage 1, and would not find room for shards on its GPU; or has room for places alone.
TEST_F(RanksOnGpusTest, RanksAgreeOnWhereShardsLie) {
  for (const bool has_places : {false, true})
    comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& of) {
      Plan plan;
      plan.units.resize(1);
      UnitPlan& unit = plan.units[0];
      unit.compute = unit.updated_on = kDevice;
      unit.stage = of.rank() == 0 && !has_places ? 1 : 3;
      if (unit.stage == 3) unit.place(Part::kParameters, allocator::Tier::kRanks);
      if (of.rank() == 0) unit.updated_on = kHost;
      if (of.rank() == 0 && has_places) plan.passing_places = 1;
      PlanRequest request;
      const ShardPlace expected = has_places ? ShardPlace::kPassed : ShardPlace::kHost;
      EXPECT_EQ(agree_on_plan(of, plan, request), of.rank() == 1 || !has_places);
      EXPECT_EQ(request.stages, std::vector<std::size_t>{3});
      EXPECT_EQ(request.shards, expected);
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

// What is done with gradients between their sums and the step, by all ranks alike or not.
TEST_F(RanksOnGpusTest, PartsOfGradientsAreDroppedAndKeptByAllRanksAlike) {
  Case setup;
  setup.ends = true, setup.rows = 300;
  setup.stage = 2;
  setup.device = 192 * kMiB;
  const StepSettings settings{.groups = {{0.02, 0.1}, {0.02, 0}}, .clip = 0.5};
  begin_devices(2, Schedule::kRandom, 1);
  train(2, [&](comm::Communicator& of) {
    const std::unique_ptr<Device> device = open_for(of);
    const Case own = of_rank(setup, of);
    OnGpu gpu(own, *device, &of);
    AnyOrderEngine& engine = gpu.engine;
    EXPECT_TRUE(gpu.made.plan.sums_in_backward);
    gpu.client.load();
    const auto add = [&](UnitId unit, const char* refusal = nullptr) {
      engine.acquire(unit, Hold::kGradient);
      for (ParameterId p = engine.layout().first_parameter(unit); p < engine.layout().end_parameter(unit);
           ++p) {
        const auto call = [&] {
          engine.add_gradient(p, gpu.hands.copy_of(engine.parameter(p), gpu.client.bytes(p)));
        };
        if (refusal == nullptr)
          call();
        else
          expect_error(ErrorCode::kState, {refusal}, call);
      }
      engine.release(unit);
    };
    const auto compute = [&] {
      for (UnitId unit = 0; unit < engine.layout().units().size(); ++unit)
        if (engine.layout().trainable(unit)) add(unit);
      engine.end_micro_batch();
    };
    const auto drop_all = [&] {
      for (ParameterId p = 0; p < engine.layout().parameters(); ++p) engine.drop_gradient(p);
    };
    const auto refused = [](ErrorCode code, const char* what, const std::function<void()>& call) {
      expect_error(code, {what}, call);
    };
    engine.begin_step(settings);
    compute();
    const double norm = engine.gradient_norm(0);
    refused(ErrorCode::kState, "ask for stage 1", [&] { engine.read_gradient(0, {nullptr, Dtype::kF32}); });
    add(1, "added to no more");
    drop_all();
    compute();  // the same micro-batch again
    EXPECT_EQ(engine.gradient_norm(0), norm);
    StepSettings others = settings;
    others.groups[0].learning_rate *= of.rank() + 1;
    refused(ErrorCode::kState, "give all ranks the same", [&] { engine.step(others); });
    if (of.rank() == 1) engine.drop_gradient(0);
    refused(ErrorCode::kState, "was dropped on rank 1, and is there on rank 0",
            [&] { engine.step(settings); });
    if (of.rank() == 0) engine.drop_gradient(0);
    if (of.rank() == 1) engine.multiply_gradient(2, 0.5);
    refused(ErrorCode::kState, "was multiplied by 0.5 on rank 1", [&] { engine.step(settings); });
    if (of.rank() == 0) engine.multiply_gradient(2, 0.5);
    StepSettings keeping = settings;
    keeping.keep_gradients = true;
    EXPECT_GT(engine.step(keeping).gradient_norm, 0);
    EXPECT_GT(engine.gradient_norm(1), 0);
    engine.begin_step(settings);
    add(1, "ask for stage 1");
    return Outcome{};
  });
}

// A part that is kept over a step lies beside a new one of another parameter of its unit.
TEST_F(RanksOnGpusTest, PartsThatAreKeptStayBesideNewOnesOfTheirUnit) {
  Outcomes of_stages[2];
  for (const std::size_t stage : {1, 2}) {
    Case setup;
    setup.ends = true, setup.rows = 300, setup.blocks = 6;
    setup.stage = stage;
    setup.device = 192 * kMiB;
    setup.updates = kDevice;
    const StepSettings settings{.groups = {{0.02, 0.1}, {0.02, 0}}, .clip = 0.5, .keep_gradients = true};
    begin_devices(2, Schedule::kLate, 1);
    of_stages[stage - 1] = train(2, [&](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_for(of);
      const Case own = of_rank(setup, of);
      OnGpu gpu(own, *device, &of);
      AnyOrderEngine& engine = gpu.engine;
      EXPECT_EQ(gpu.made.plan.sums_in_backward, stage == 2);
      gpu.client.load();
      const Layout& layout = engine.layout();
      const auto add = [&](const std::function<bool(ParameterId)>& has) {
        for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
          if (!layout.trainable(unit)) continue;
          engine.acquire(unit, Hold::kGradient);
          for (ParameterId p = layout.first_parameter(unit); p < layout.end_parameter(unit); ++p)
            if (has(p)) engine.add_gradient(p, gpu.hands.copy_of(engine.parameter(p), gpu.client.bytes(p)));
          engine.release(unit);
        }
        engine.end_micro_batch();
        return engine.step(settings).gradient_norm;
      };
      const auto is_new = [&](ParameterId p) { return p == layout.first_parameter(1) + 1; };
      engine.begin_step(settings);
      const double first = add([](ParameterId) { return true; });
      engine.drop_gradient(layout.first_parameter(1) + 1);
      engine.begin_step(settings);
      const double second = add(is_new);
      Outcome outcome = gpu.client.save();
      outcome.norms = {first, second};
      return outcome;
    });
  }
  EXPECT_TRUE(of_stages[0] == of_stages[1]);
}

// From the second step on ranks know which units have gradients, and in which order.
TEST_F(RanksOnGpusTest, SumsAreMadeBeforeTheMicroBatchEnds) {
  for (const auto gradients : {kDevice, kHost}) {
    Case all;
    all.ends = all.once = true;
    all.device = 192 * kMiB;
    all.places = {kHost, gradients, kHost};
    all.updates = kHost;
    begin_devices(2, Schedule::kRandom, 1);
    comm::run_communicators(comm::World::kThreads, 2, [&](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_for(of);
      OnGpu gpu(of_rank(all, of), *device, &of);
      gpu.client.load();
      for (const int step : {0, 1, 4}) {
        const std::uint64_t before = of.counters().received;
        gpu.client.after_backward = [&, step](UnitId unit) {
          if (unit != 0) return;
          const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
          while (step == 4 && of.counters().received - before < gpu.made.plan.step_bytes_received &&
                 std::chrono::steady_clock::now() < deadline)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          EXPECT_TRUE(step < 4 || of.counters().received - before >= gpu.made.plan.step_bytes_received);
        };
        gpu.client.step(step);
      }
      of.barrier(1, "the end of a test");
    });
  }
}

// What interrupts a step while its sums go on: it is abandoned, when ranks have begun different ones, and
// made again; or more is added to what is being summed, and what comes behind it does not come to one of
// them.
TEST_F(RanksOnGpusTest, SumsThatGoOnAreJoinedByAll) {
  struct Stop {};
  static constexpr UnitId kAgain = 5;  // to which ranks come first
  const auto train_one = [](const Case& own, Client& client, AnyOrderEngine& engine, Hands& hands) {
    client.load();
    std::vector<double> norms;
    for (int step = 0; step < 4; ++step) {
      client.after_backward = [&](UnitId unit) {
        if (step == 1 && unit == (own.ranks.rank == 0 ? 3 : 0)) throw Stop();
        if (step < 3 || unit != kAgain) return;
        const ParameterId p = engine.layout().first_parameter(kAgain);
        engine.acquire(kAgain, Hold::kGradient);
        engine.add_gradient(p, hands.copy_of(engine.parameter(p), client.bytes(p)));
        engine.release(kAgain);
      };
      if (step == 1) {
        EXPECT_THROW(client.step(step), Stop);
        engine.abandon_step();
        client.after_backward = {};
      }
      norms.push_back(client.step(step));
    }
    Outcome outcome = client.save();
    outcome.norms = norms;
    return outcome;
  };
  Case setup;
  setup.ends = true, setup.blocks = 5, setup.stage = 1;
  const Outcomes expected = train(2, [&](comm::Communicator& of) {
    const Case own = of_rank(setup, of);
    Made made(own, nullptr, &of);
    HandsOnCpu hands;
    Client client(own, *made.engine, hands);
    return train_one(own, client, *made.engine, hands);
  });
  setup.device = 192 * kMiB;
  for (const auto& [gradients, gpus_meet] :
       {std::pair{kDevice, false}, std::pair{kHost, false}, std::pair{kDevice, true}}) {
    setup.places = {kHost, gradients, kHost};
    setup.updates = kHost;
    setup.ranks.gpus_meet = gpus_meet;
    begin_devices(2, Schedule::kLate, 3);
    EXPECT_EQ(train(2,
                    [&](comm::Communicator& of) {
                      const std::unique_ptr<Device> device = open_for(of);
                      const Case own = of_rank(setup, of);
                      OnGpu gpu(own, *device, &of);
                      return train_one(own, gpu.client, gpu.engine, gpu.hands);
                    }),
              expected);
  }
}

// What is left of a narrow gradient that was dropped is no part of a sum; and each rank gives what it has in
// the type in which it has it.
TEST_F(RanksOnGpusTest, RanksWithNoGradientAndWithSeveralAddToOneOfAnother) {
  Case setup;
  setup.dtype = Dtype::kBf16;
  setup.stage = 1;
  setup.optimizer = optimizer_of("adamw", Dtype::kF32, true);
  const auto train_one = [](Client& client, AnyOrderEngine& engine, Hands& hands, int rank) {
    client.load();
    engine.begin_step({{{0.02, 0.1}, {0.02, 0}}});
    for (const bool dropped : {true, false})
      for (ParameterId p = 0; p < engine.layout().parameters(); ++p) {
        const UnitId unit = engine.layout().location(p).unit;
        if (!engine.layout().trainable(unit) || (!dropped && rank == 1 && unit == 1)) continue;
        engine.acquire(unit, Hold::kGradient);
        for (int times = 0; times < (!dropped && unit == (rank == 0 ? 3u : 2u) ? 2 : 1); ++times)
          engine.add_gradient(p, hands.copy_of(engine.parameter(p), client.bytes(p)));
        engine.release(unit);
        if (dropped) engine.drop_gradient(p);
      }
    const double norm = engine.step({{{0.02, 0.1}, {0.02, 0}}}).gradient_norm;
    Outcome outcome = client.save();
    outcome.norms = {norm};
    return outcome;
  };
  const Outcomes expected = train(2, [&](comm::Communicator& of) {
    const Case own = of_rank(setup, of);
    Made made(own, nullptr, &of);
    HandsOnCpu hands;
    Client client(own, *made.engine, hands);
    return train_one(client, *made.engine, hands, of.rank());
  });
  setup.device = 192 * kMiB;
  EXPECT_GT(expected[0].norms[0], 0);
  for (const bool gpus_meet : {false, true}) {
    setup.ranks.gpus_meet = gpus_meet;
    begin_devices(2, Schedule::kRandom, 3);
    const Outcomes found = train(2, [&](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_for(of);
      const Case own = of_rank(setup, of);
      OnGpu gpu(own, *device, &of);
      return train_one(gpu.client, gpu.engine, gpu.hands, of.rank());
    });
    EXPECT_EQ(found, expected);
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
      if (forbids && of.rank() == 1) comm::forbid_descriptors();
      const BetweenGpus found = measure_between_gpus(of, *device, 64 * kMiB, "");
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
  };
  using Clock = std::chrono::steady_clock;
  for (const auto& [stage, updates, gpus_meet, result, cause, calls] :
       {Failing{0, kDevice, false, 719, "CUDA_ERROR_LAUNCH_FAILED", 0},
        Failing{0, kDevice, true, 214, "CUDA_ERROR_ECC_UNCORRECTABLE", 150},
        Failing{1, kHost, false, 46, "CUDA_ERROR_DEVICE_UNAVAILABLE", 600},
        Failing{1, kDevice, true, 2, "CUDA_ERROR_OUT_OF_MEMORY", 0},
        Failing{3, kHost, false, 214, "CUDA_ERROR_ECC_UNCORRECTABLE", 600},
        Failing{3, kHost, true, 719, "CUDA_ERROR_LAUNCH_FAILED", 150},
        Failing{3, kDevice, true, 46, "CUDA_ERROR_DEVICE_UNAVAILABLE", 600}}) {
    SCOPED_TRACE(fmt::format("stage {}, updates by the {}, GPUs {}, {} after {} calls", stage,
                             name_of(updates), gpus_meet ? "meet" : "do not meet", cause, calls));
    Case all;
    all.ends = all.once = true;
    all.blocks = 5, all.steps = 4;
    all.stage = stage;
    all.device = 192 * kMiB;
    all.updates = updates;
    all.places = {kDevice, updates, updates};
    all.ranks.gpus_meet = gpus_meet;
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
                                         Kind{"adafactor", Dtype::kF32, Dtype::kF32, 3, 5}));

}  // namespace ranks_test
}  // namespace sluice::engine::twins
