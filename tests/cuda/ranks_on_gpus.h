#pragma once
#include "comm/worlds.h"
#include "cuda/engine_fixture.h"
#include "cuda/file_limit.h"
#include "engine/memory/device_shards.h"
#include "thrown.h"

// Ranks that compute on GPUs, each on one of its own, beside as many that compute on the CPU.
namespace sluice::engine::twins {

// The stage, the processor that updates, the tiers of parameters, gradients and state, and the GPUs' links.
struct Placed {
  std::size_t stage;
  allocator::Tier updates, parameters, gradients, state;
  bool gpus_meet = false;
  Dtype dtype = Dtype::kF32;
  bool by_nccl = false;
};

class RanksOnGpusTest : public DeviceEngineTest {
 protected:
  static std::string text(const Placed& p) {
    return fmt::format("{}, stage {}, updates by the {}, {} {} {}, GPUs {}", name_of(p.dtype), p.stage,
                       name_of(p.updates), name_of(p.parameters), name_of(p.gradients), name_of(p.state),
                       p.by_nccl     ? "meet by NCCL"
                       : p.gpus_meet ? "meet"
                                     : "do not meet");
  }
  static Case placed(Case setup, const Placed& p) {
    setup.dtype = p.dtype;
    if (setup.optimizer.name == Case().optimizer.name && p.dtype != Dtype::kF32)
      setup.optimizer = optimizer_of("adamw", Dtype::kF32, true);
    setup.stage = p.stage;
    setup.updates = p.updates;
    setup.places = {p.parameters, p.gradients, p.state};
    setup.ranks.gpus_meet = p.gpus_meet;
    setup.ranks.by_nccl = p.by_nccl;
    return setup;
  }
  // Ranks have the bits of as many on the CPU. setup.device is the budget of a GPU's memory.
  void expect_bits_of_cpus(const Case& setup, int ranks, const Placed& p, Schedule schedule,
                           std::uint64_t seed, const std::function<void(const Made&)>& look = {}) {
    SCOPED_TRACE(text(p));
    const Case on_gpus = placed(setup, p);
    const Outcomes expected = train_on_cpus(on_gpus, ranks);
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
    const RankOf asked = setup.ranks;
    setup.ranks = {communicator.rank(), communicator.size()};
    setup.ranks.gpus_meet = asked.gpus_meet;
    setup.ranks.by_nccl = asked.by_nccl;
    for (int rank = 0; rank < communicator.size(); ++rank)
      setup.ranks.hosts.push_back(communicator.hosts().first_of(rank));
    return setup;
  }
  // Trains as many ranks without the setup's GPUs.
  Outcomes train_on_cpus(Case setup, int ranks) {
    setup.device = 0, setup.places = {}, setup.updates = {}, setup.ranks = {};
    return train(ranks, [&](comm::Communicator& of) { return train_on_cpu(of_rank(setup, of), &of); });
  }
  // Two ranks of which one can open no file when they join their memory, so that they send shards instead,
  // through memory that no plan has for that. look() sees each rank's engine when it has trained.
  void expect_bits_of_cpus_without_shared_memory(
      const Case& setup, const std::function<void(const OnGpu& gpu, comm::Communicator& of)>& look = {}) {
    const Outcomes expected = train_on_cpus(setup, 2);
    begin_devices(2, Schedule::kRandom, 1);
    FileLimit limit;
    const Outcomes found = train(2, [&](comm::Communicator& of) {
      const std::unique_ptr<Device> device = open_device(of.rank());
      const Case own = of_rank(setup, of);
      OnGpu gpu(own, *device, &of);
      gpu.made.ledger.set_budget(kHost, gpu.made.plan.peak_memory + DeviceShards::bytes());
      of.barrier(1, "all engines");
      if (of.rank() == 0) limit.set(0);
      of.barrier(1, "the limit");
      gpu.client.load();
      of.barrier(1, "all values");
      if (of.rank() == 0) limit.reset();
      Outcome outcome = trained(own, gpu.client);
      if (look) look(gpu, of);
      return outcome;
    });
    EXPECT_EQ(found, expected);
  }
  static ShardPlace shards_of(const Case& setup) {
    if (setup.stage != 3 || !setup.ranks.gpus_read() || setup.places[0] == kDisk) return ShardPlace::kHost;
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
  // Returns the bytes that a rank's GPU copies of others at stage 3 by the plan: the last unit is still there
  // in backward, and small ones are gathered once.
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

}  // namespace sluice::engine::twins
