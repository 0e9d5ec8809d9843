#include "engine/ranks_client.h"
#include "testing.h"

// Tests of parameters of which each rank has a shard on disk, in any order, and of plans that move shards.
namespace sluice::engine::wrapped::shards_on_disk_test {

Case at_stage_3(const char* place, int ranks = 2) {
  Case setup{.ranks = ranks, .stage = 3, .place = place};
  return setup;
}

std::size_t shards_on_disk(const Plan& plan) {
  return static_cast<std::size_t>(std::ranges::count(plan.units, true, &UnitPlan::shard_on_disk));
}

// between: what a rank does after each step.
toy::Outcome trained(const Case& setup, const std::function<void(Rank& rank, int step)>& between = {}) {
  toy::Outcome outcome;
  run(setup, [&](Rank& rank) {
    for (int step = 0; step < 3; ++step) {
      rank.engine.begin_step(setup.at_once ? Rank::settings() : StepSettings{});
      rank.add_all(step);
      rank.engine.step(Rank::settings());
      if (between) between(rank, step);
    }
    toy::Outcome saved = rank.save();
    if (rank.rank() == 0) outcome = std::move(saved);
  });
  return outcome;
}

TEST(ShardsOnDisk, AreThoseOfEachUnitThatIsPartitioned) {
  run(at_stage_3("disk"), [](Rank& rank) {
    EXPECT_EQ(shards_on_disk(rank.plan()), 5u);  // not that of the small unit
    EXPECT_GT(rank.plan().serving_pieces, 0u);
    EXPECT_EQ(rank.ledger().snapshot().total[static_cast<std::size_t>(allocator::Tier::kDisk)].peak,
              rank.plan().disk_bytes);
  });
  run(at_stage_3("memory"), [](Rank& rank) { EXPECT_EQ(shards_on_disk(rank.plan()), 0u); });
}

// Each rank has other plans, and changes them at other times. No plan's memory is exceeded on the way.
TEST(ShardsOnDisk, MoveByAnotherPlanAndKeepTheirBits) {
  for (const bool at_once : {false, true}) {
    Case setup = at_stage_3(nullptr, 3);
    setup.optimizer.name = at_once ? "adafactor" : "adamw";
    setup.at_once = at_once;
    setup.blocks = 16;
    const toy::Outcome expected = trained(setup);
    const toy::Outcome found = trained(setup, [&](Rank& rank, int step) {
      const Plan small = rank.plan_in(rank.least_memory()), large = rank.plan_in(kGiB);
      EXPECT_GT(shards_on_disk(small), 0u);
      EXPECT_EQ(shards_on_disk(large), 0u);
      // (Records on disk stay, and with them what describes them.)
      rank.limit_memory(std::max(small.peak_memory, large.peak_memory) + 64 * 1024);
      rank.engine.replan((rank.rank() + step) % 2 == 0 ? small : large);
    });
    EXPECT_TRUE(found == expected) << setup.optimizer.name << (at_once ? " at once" : "");
  }
}

// The other rank waits for longer than it has patience with ranks that do not work.
TEST(ShardsOnDisk, MoveForAsLongAsItTakes) {
  using Clock = std::chrono::steady_clock;
  Case setup = at_stage_3(nullptr);
  setup.blocks = 16;
  setup.disk_delay = 40'000;
  setup.patience = std::chrono::milliseconds(650);
  std::atomic<bool> ended{false};
  run(setup, [&](Rank& rank) {
    const auto values = rank.values();
    const Plan few = rank.plan_in(rank.least_memory()), all = rank.plan_in(kGiB);
    ASSERT_GT(shards_on_disk(few), 0u);
    rank.communicator()->barrier(1, "the plans");
    if (rank.rank() == 0) {
      for (const Plan* const plan : {&few, &all}) {
        const Clock::time_point begin = Clock::now();
        rank.engine.replan(*plan);
        EXPECT_GT(Clock::now() - begin, 2 * setup.patience);
      }
      ended = true;
      return;
    }
    while (!ended) EXPECT_TRUE(rank.values() == values);
  });
}

TEST(ShardsOnDisk, AreEditedAndRead) {
  run(at_stage_3(nullptr), [&](Rank& rank) {
    for (int step = 0; step < 3; ++step) {
      rank.engine.begin_step({});
      rank.add_all(step);
      rank.engine.step(Rank::settings());
      rank.engine.acquire(kFirst, Hold::kEdit);
      const ConstArray values = rank.engine.parameter(kA);
      for (const std::size_t at : {std::size_t{1}, rank.elements(kA) - 2})  // of both shards
        const_cast<float*>(values.f32())[at] = 42.0f + static_cast<float>(step);
      rank.engine.release(kFirst);
      const auto after = rank.values();
      EXPECT_EQ(after[kA][1], 42.0f + static_cast<float>(step));
      EXPECT_EQ(after[kA][rank.elements(kA) - 2], 42.0f + static_cast<float>(step));
      rank.engine.replan(rank.plan_in(step == 0 ? rank.least_memory() : kGiB));
    }
  });
}

// Values that are set anew change shards, which another rank may still be reading.
TEST(ShardsOnDisk, AreSetWhenNoRankReadsThem) {
  for (const char* const place : {"memory", "disk"}) {
    std::atomic<bool> has_read{false};
    run(at_stage_3(place), [&](Rank& rank) {
      const auto values = rank.values();
      if (rank.rank() == 1) {
        for (int pass = 0; pass < 5; ++pass) EXPECT_TRUE(rank.values() == values);
        has_read = true;
      }
      UnitSource source;
      source.values = [&](ParameterId p, std::size_t first, std::span<float> out) {
        for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>((first + i) % 1000 + p);
      };
      rank.engine.load(kFirst, source);
      EXPECT_TRUE(has_read);
      const auto after = rank.values();
      EXPECT_EQ(after[kA][999], 999);
      EXPECT_EQ(after[kA][rank.elements(kA) - 1], static_cast<float>((rank.elements(kA) - 1) % 1000));
    });
  }
}

}  // namespace sluice::engine::wrapped::shards_on_disk_test
