#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <random>
#include <string>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/planner/planner.h"
#include "engine/refused.h"
#include "engine/toy.h"
#include "thrown.h"

// What the plans of several ranks have to do with each other.
namespace sluice::engine {
namespace ranks_test {

constexpr int kRanks = 3;

Profile matrices(std::mt19937& random) {
  Profile profile = toy::profile(2, {Dtype::kF32}, 1 + random() % 4);
  for (UnitSpec& unit : profile.units)
    unit.parameters[0].shape = {64 + random() % 4000, 64 + random() % 1500};
  return profile;
}

Plan plan_of(int rank, const Profile& profile, const optim::Optimizer& optimizer, std::uint64_t memory,
             std::uint64_t disk) {
  PlanRequest request;
  request.ranks = {rank, kRanks};
  request.stage = kMostStage;
  request.flags = true;
  return make_plan(profile, optimizer, {memory, disk, 0}, request, {});
}

// Shards differ, so that the memory that one rank needs may be too little for another.
TEST(PlansOfRanks, FitTheMemoryThatTheRefusalOfAnyOneNames) {
  std::mt19937 random(8);
  const auto optimizer = optim::make_optimizer({.name = "adafactor"});
  for (int round = 0; round < 40; ++round) {
    const Profile profile = matrices(random);
    const std::uint64_t disk = round % 2 == 0 ? 0 : 4 * kGiB;
    for (int refused = 0; refused < kRanks; ++refused) {
      const std::string text = thrown_by([&] { plan_of(refused, profile, *optimizer, kMiB, disk); }).text;
      const auto memory = mebibytes_after("--memory ", text);
      ASSERT_TRUE(memory) << text;
      const std::uint64_t more_disk = mebibytes_after("--disk FOLDER:", text).value_or(disk);
      for (int rank = 0; rank < kRanks; ++rank)
        EXPECT_NO_THROW(plan_of(rank, profile, *optimizer, *memory, more_disk)) << rank << ": " << text;
    }
  }
}

// Blocks of 16 MiB behind a table of which a step has few rows.
Profile blocks_behind_a_table(std::size_t blocks, std::size_t rows) {
  Profile profile;
  profile.micro_batches = 4;
  profile.tokens = 100;
  profile.units.push_back({"table", {{"table", {rows, 1024}}}});
  profile.units.back().parameters.front().by_tokens = true;
  for (std::size_t i = 0; i < blocks; ++i)
    profile.units.push_back({std::to_string(i), {{std::to_string(i), {2048, 2048}}}});
  const auto end = static_cast<UnitId>(profile.units.size());
  for (UnitId unit = 0; unit < end; ++unit) {
    UnitProfile& own = profile.unit_profiles.emplace_back();
    own.forward.attention = 1e9;
    own.backward.attention = 2e9;
    own.choices.emplace_back();
    profile.schedule.push_back({unit, true, -1, false});
  }
  for (UnitId unit = end; unit-- > 0;) profile.schedule.push_back({unit, true, 0, true});
  return profile;
}

std::optional<Plan> plan_with(double link, std::uint64_t memory, std::uint64_t disk,
                              std::optional<std::size_t> stage, const Profile& profile) {
  const auto optimizer = optim::make_optimizer({});
  PlanRequest request;
  request.ranks = {0, 2};
  request.stage = stage;
  MachineRates rates;
  rates.link = Link{link, 1e-5};
  try {
    return make_plan(profile, *optimizer, {memory, disk, 0}, request, rates);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kBudget);
    return std::nullopt;
  }
}

std::uint64_t traffic(const Plan& plan) {
  return plan.step_bytes_received + plan.step_bytes_read + plan.step_bytes_written;
}

TEST(PlansOfRanks, ChooseStagesUnitByUnit) {
  constexpr double kSameTime = 0.011;  // two plans may each be within half a percent of the fastest
  const Profile profile = blocks_behind_a_table(16, 8192);
  for (const double link : {1e8, 1e9})
    for (const std::uint64_t disk : {std::uint64_t{0}, 4 * kGiB}) {
      std::size_t mixed = 0, between = 0;
      for (std::uint64_t memory = 1400 * kMiB; memory > 200 * kMiB; memory -= 40 * kMiB) {
        const auto plan = plan_with(link, memory, disk, std::nullopt, profile);
        std::optional<Plan> fastest;  // of those with one stage for all units
        for (std::size_t stage = 0; stage <= kMostStage; ++stage) {
          const auto at = plan_with(link, memory, disk, stage, profile);
          if (at && (!fastest || at->time.step < fastest->time.step)) fastest = at;
        }
        ASSERT_EQ(plan.has_value(), fastest.has_value()) << memory;
        if (!plan) continue;
        EXPECT_LE(plan->peak_memory, memory);
        EXPECT_LE(plan->time.step, (1 + kSameTime) * fastest->time.step) << memory;
        EXPECT_TRUE(traffic(*plan) <= traffic(*fastest) || plan->time.step < fastest->time.step) << memory;
        const std::vector<std::size_t> stages = plan->stages();
        const auto in_parts = std::count(stages.begin() + 1, stages.end(), kMostStage);
        mixed += plan->one_stage() ? 0 : 1;
        between += in_parts > 0 && in_parts < std::ssize(stages) - 1 ? 1 : 0;
      }
      EXPECT_GE(mixed, 3u) << link;
      EXPECT_GE(between, 1u) << link;
    }
}

// Clients in any order have their gradients whole until the step: stage 2 takes what stage 1 does, and says
// so.
TEST(PlansOfRanks, SayWhereStage2IsAsStage1) {
  const Profile scheduled = toy::profile(1), any_order = any_order_profile(scheduled.units, 2);
  const auto optimizer = optim::make_optimizer({});
  const auto says = [&](const Profile& profile, std::size_t stage, bool clip) {
    PlanRequest request;
    request.ranks = {0, 2};
    request.stage = stage;
    request.clip = clip;
    const Budget budget{kGiB, kGiB, 0};
    const Plan plan = make_plan(profile, *optimizer, budget, request, {});
    const std::string text = to_text(plan, profile, budget);
    return text.find("gradients that wait for step() are whole at every stage") != std::string::npos;
  };
  EXPECT_FALSE(says(any_order, 1, true));
  EXPECT_TRUE(says(any_order, 2, true));
  EXPECT_TRUE(says(any_order, 3, true));
  EXPECT_FALSE(says(any_order, 2, false));
  EXPECT_FALSE(says(scheduled, 2, true));
}

// What each rank would have to be sent of a table that the others have updated is more than the rows of its
// gradient.
TEST(PlansOfRanks, ReplicateTablesOfWhichAStepHasFewRows) {
  const Profile profile = blocks_behind_a_table(8, 65536);
  const auto plan = plan_with(2e8, 8 * kGiB, 0, std::nullopt, profile);
  EXPECT_EQ(plan->units[0].stage, 0u);
  const std::uint64_t others_half = std::uint64_t{65536} * 1024 * sizeof(float) / 2;
  EXPECT_LT(plan->step_bytes_received + others_half * 9 / 10,
            plan_with(2e8, 8 * kGiB, 0, 2, profile)->step_bytes_received);
}

// Each rank has a GPU, on which not all fits, and less and less host memory.
TEST(PlansOfRanks, OnGpusHaveTheLeastStageWithWhichNothingIsOnDisk) {
  std::vector<UnitSpec> units;
  for (int unit = 0; unit < 16; ++unit) {
    const std::string name = std::to_string(unit);
    units.push_back({name, {{"weight" + name, {4096, 1024}}}});
  }
  const Profile profile = any_order_profile(units, 1);
  const auto optimizer = optim::make_optimizer({});
  std::vector<std::size_t> stages;
  std::size_t on_disk = 0;
  for (std::uint64_t memory = 2 * kGiB; memory > 64 * kMiB; memory -= 16 * kMiB) {
    PlanRequest request;
    request.ranks = {1, 4};
    request.chunk_elements = kChunkGrain;
    std::optional<Plan> plan;
    try {
      plan = make_plan(profile, *optimizer, {memory, 4 * kGiB, 0, 144 * kMiB}, request, {});
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kBudget) << error.what();
      continue;
    }
    EXPECT_LE(plan->peak_memory, memory);
    ASSERT_TRUE(plan->one_stage());
    on_disk += plan->uses_disk() ? 1 : 0;
    EXPECT_EQ(plan->uses_disk(), on_disk > 0) << format_size(memory);
    if (!plan->uses_disk() && (stages.empty() || stages.back() != *plan->one_stage()))
      stages.push_back(*plan->one_stage());
  }
  EXPECT_EQ(stages, (std::vector<std::size_t>{0, 1, 3}));
  EXPECT_GT(on_disk, 0u);
}

}  // namespace ranks_test
}  // namespace sluice::engine
