#include "core/bytes.h"
#include "core/error.h"
#include "engine/memory/device_shards.h"
#include "engine/planner/planner.h"
#include "engine/refused.h"
#include "engine/toy.h"
#include "thrown.h"

// The plans of several ranks fit each other.
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

// The rows of a table's gradient are fewer bytes than the rest of the table, which each rank would have to be
// sent after an update.
TEST(PlansOfRanks, ReplicateTablesOfWhichAStepHasFewRows) {
  const Profile profile = blocks_behind_a_table(8, 65536);
  const auto plan = plan_with(2e8, 8 * kGiB, 0, std::nullopt, profile);
  EXPECT_EQ(plan->units[0].stage, 0u);
  const std::uint64_t others_half = std::uint64_t{65536} * 1024 * sizeof(float) / 2;
  EXPECT_LT(plan->step_bytes_received + others_half * 9 / 10,
            plan_with(2e8, 8 * kGiB, 0, 2, profile)->step_bytes_received);
}

Profile sixteen_matrices() {
  std::vector<UnitSpec> units;
  for (int unit = 0; unit < 16; ++unit) {
    const std::string name = std::to_string(unit);
    units.push_back({name, {{"weight" + name, {4096, 1024}}}});
  }
  return any_order_profile(units, 1);
}

// Each rank has a GPU, on which not all fits, and less and less host memory.
// Where computing takes nearly all of a step, stages are alike, and the least one is chosen. Otherwise at
// stage 1 less is received than at stage 0.
TEST(PlansOfRanks, OnGpusHaveTheFastestStageWithWhichNothingIsOnDisk) {
  for (const std::optional<double> computing : {std::optional<double>(), std::optional(1000.0)}) {
    const Profile profile = sixteen_matrices();
    const auto optimizer = optim::make_optimizer({});
    std::vector<std::size_t> stages;
    std::size_t on_disk = 0;
    for (std::uint64_t memory = 2 * kGiB; memory > 64 * kMiB; memory -= 16 * kMiB) {
      PlanRequest request;
      request.ranks = {1, 4};
      request.chunk_elements = kChunkGrain;
      request.computing = computing;
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
    EXPECT_EQ(stages, computing ? std::vector<std::size_t>({0, 1, 3}) : std::vector<std::size_t>({1, 3}));
    EXPECT_GT(on_disk, 0u);
  }
}

// Of ranks with a GPU each, on which not all fits unless more is stated. Rank 0 copies a billion bytes a
// second in host memory.
Plan plan_on_gpus(int ranks, std::optional<std::size_t> stage, bool clip, const std::optional<Link>& link,
                  const Profile& profile, std::uint64_t device = 160 * kMiB,
                  const std::vector<int>& hosts = {}, bool gpus_meet = false) {
  PlanRequest request;
  request.ranks = {0, ranks, hosts};
  request.ranks.gpus_meet = gpus_meet;
  request.stage = stage;
  request.clip = clip;
  request.chunk_elements = kChunkGrain;
  request.computing = 0.1;
  MachineRates rates;
  rates.rank_processor_seconds = 1e-9;
  rates.link = link;
  return make_plan(profile, *optim::make_optimizer({}), {4 * kGiB, 0, 0, device}, request, rates);
}

// Calls body(profile, stage, clip) for all that decides when ranks sum and gather.
void for_each_way_to_sum(const std::function<void(const Profile&, std::size_t, bool)>& body) {
  Profile profile = sixteen_matrices();
  for (const bool beside : {false, true}) {
    profile.ends_micro_batches = beside;
    for (const bool clip : {false, true})
      for (const std::size_t stage : {std::size_t{0}, std::size_t{1}, kMostStage}) body(profile, stage, clip);
  }
}

TEST(PlansOfRanks, OnGpusReceiveMoreTheMoreTheyAre) {
  for_each_way_to_sum([](const Profile& profile, std::size_t stage, bool clip) {
    std::uint64_t received = 0;
    for (const int ranks : {2, 4, 8}) {
      const Plan plan = plan_on_gpus(ranks, stage, clip, std::nullopt, profile);
      EXPECT_GT(plan.step_bytes_received, received) << ranks;
      received = plan.step_bytes_received;
      // One thread copies what is sent. For each byte that is read there all of them move, at 10 GB/s, two
      // where parameters are gathered, and of a sum one and what the mean takes, which eight ranks share out.
      const double sent = static_cast<double>(received) * 1e-9;
      // That say that shards, or parts of what is summed and gathered, are there.
      const double messages = stage == 0 ? 0 : (stage == kMostStage ? 31 + 16 : 2 * 16) * 5e-5;
      EXPECT_GE(plan.device_time.ranks, (stage == 0 ? 1 : 0.14) * sent - 1e-9);
      EXPECT_LE(plan.device_time.ranks, (stage == 0 ? 1 : 0.6) * sent + messages + 1e-9);
      EXPECT_GE(plan.device_time.step, plan.device_time.least());
      EXPECT_TRUE(stage > 0 || plan.device_time.bound() == std::string("ranks"));
    }
  });
}

TEST(PlansOfRanks, OnGpusTakeNoLessOverASlowerLink) {
  for_each_way_to_sum([](const Profile& profile, std::size_t stage, bool clip) {
    for (const int ranks : {1, 2, 4}) {
      const double unknown = plan_on_gpus(ranks, stage, clip, std::nullopt, profile).device_time.step;
      double before = unknown;
      for (const double bandwidth : {1e12, 1e9, 3e8, 1e8}) {
        const double step = plan_on_gpus(ranks, stage, clip, Link{bandwidth, 5e-5}, profile).device_time.step;
        EXPECT_GE(step, before) << ranks << " ranks at stage " << stage << ", " << bandwidth;
        before = step;
      }
      EXPECT_EQ(before > unknown, ranks > 1);
    }
  });
}

TEST(PlansOfRanks, OnGpusSayWhatIsReceivedAndHowLongThatTakes) {
  const Profile profile = sixteen_matrices();
  const Budget budget{4 * kGiB, 0, 0, 160 * kMiB};
  const std::string unknown = "what joins the ranks is not known";
  const Plan alone = plan_on_gpus(1, 0, true, std::nullopt, profile);
  EXPECT_EQ(to_text(alone, profile, budget).find("ranks"), std::string::npos);
  EXPECT_EQ(to_json(alone, profile, budget).at("step").at("ranks_seconds"), 0);
  const Plan plan = plan_on_gpus(2, 0, true, std::nullopt, profile);
  const std::string text = to_text(plan, profile, budget);
  // Half of a gradient of 256 MiB for a rank's own part of the sum, and the other half of the sum.
  EXPECT_NE(text.find("bound by ranks"), std::string::npos) << text;
  EXPECT_NE(text.find("the ranks alone 0.27 s for 256 MiB that are received"), std::string::npos) << text;
  EXPECT_NE(text.find(unknown), std::string::npos) << text;
  EXPECT_DOUBLE_EQ(to_json(plan, profile, budget).at("step").at("ranks_seconds"), 0.268435456);
  const Plan linked = plan_on_gpus(2, 0, true, Link{1e9, 0}, profile);
  EXPECT_EQ(to_text(linked, profile, budget).find(unknown), std::string::npos);
}

// Ranks may sum from the last backward on: beside 0.7 of one micro-batch's computing.
TEST(PlansOfRanks, OnGpusSumBesideTheLastMicroBatch) {
  Profile profile = sixteen_matrices();
  profile.ends_micro_batches = true;
  const auto seconds = [&](std::size_t micro_batches) {
    profile.micro_batches = micro_batches;
    return plan_on_gpus(2, 0, true, std::nullopt, profile, 4 * kGiB).device_time.step;
  };
  EXPECT_NEAR(seconds(100) - seconds(1), 0.1 * 0.7 * (1 - 0.01) * 15 / 16, 1e-3);
}

TEST(PlansOfRanks, OnGpusUpdateTheirOwnPartAlone) {
  const Profile profile = sixteen_matrices();
  const auto updates = [&](int ranks, std::size_t stage) {
    return plan_on_gpus(ranks, stage, true, std::nullopt, profile).device_time.gpu_updates;
  };
  EXPECT_EQ(updates(4, 0), updates(2, 0));
  EXPECT_DOUBLE_EQ(updates(4, 1), updates(4, 0) / 4);
}

// At stage 3 what the CPU has updated comes with the next fetch, and not before. The last matrix is there for
// forward and backward.
TEST(PlansOfRanks, OnGpusCopyPartitionedParametersOncePerFetch) {
  Profile profile = sixteen_matrices();
  for (UnitSpec& unit : profile.units) unit.dtype = Dtype::kBf16;
  const Plan plan = plan_on_gpus(2, kMostStage, true, std::nullopt, profile);
  EXPECT_TRUE(plan.updated_by_cpu()[0]);
  EXPECT_EQ(plan.step_bytes_in, 31 * 8 * kMiB);
}

// GPUs that meet have the shards, while they have room for these; or places, through which each passes on its
// own.
TEST(PlansOfRanks, OnGpusThatMeetBringTheirOwnShards) {
  const Profile profile = sixteen_matrices();
  const auto plan_of = [&](std::uint64_t device, bool meet) {
    return plan_on_gpus(2, kMostStage, true, std::nullopt, profile, device, {}, meet);
  };
  EXPECT_EQ(plan_of(kGiB, true).shard_place(), ShardPlace::kGpu);
  const Plan passed = plan_of(200 * kMiB, true), copied = plan_of(200 * kMiB, false);
  EXPECT_EQ(passed.shard_place(), ShardPlace::kPassed);
  EXPECT_EQ(passed.passing_places * passed.passing_place_bytes, 3 * 8 * kMiB);
  EXPECT_EQ(copied.shard_place(), ShardPlace::kHost);
  EXPECT_EQ(copied.step_bytes_in - passed.step_bytes_in, 31 * 8 * kMiB);
  EXPECT_EQ(passed.step_bytes_received - copied.step_bytes_received, 31 * 8 * kMiB);
  EXPECT_LT(passed.device_time.link, copied.device_time.link);
  EXPECT_LE(passed.device_time.step, copied.device_time.step);
  EXPECT_LE(passed.device_bytes, 200 * kMiB);
  EXPECT_EQ(plan_of(136 * kMiB, true).shard_place(), ShardPlace::kHost);
}

// GPUs of one host copy shards from where their owners have them. On several hosts those of others, half of
// each, come with 31 fetches of the 16 matrices, through memory of the rank.
TEST(PlansOfRanks, OnGpusOfOneHostSendNoShards) {
  const Profile profile = sixteen_matrices();
  std::uint64_t parameters = 0;
  for (UnitId unit = 0; unit < profile.units.size(); ++unit)
    parameters += Layout(profile.units).unit_bytes(unit);
  const auto staging = [](const Plan& plan) {
    return plan.bytes[static_cast<std::size_t>(allocator::Tier::kHost)]
                     [static_cast<std::size_t>(allocator::Purpose::kStaging)];
  };
  for (const bool clip : {false, true}) {
    const auto plan_of = [&](const std::vector<int>& hosts) {
      return plan_on_gpus(2, kMostStage, clip, std::nullopt, profile, 160 * kMiB, hosts);
    };
    const Plan one = plan_of({}), several = plan_of({0, 1});
    EXPECT_EQ(several.step_bytes_received - one.step_bytes_received, 31 * parameters / 32);
    EXPECT_EQ(staging(several) - staging(one), DeviceShards::bytes());
    EXPECT_EQ(one.step_bytes_in, several.step_bytes_in);
    EXPECT_LT(one.device_time.step, several.device_time.step);
  }
}

// Nothing is on disk.
TEST(PlansOfRanks, OnGpusHaveTheFastestStage) {
  const Profile profile = sixteen_matrices();
  for (const bool clip : {false, true})
    for (const std::uint64_t device : {160 * kMiB, 512 * kMiB, 4 * kGiB})
      for (const int ranks : {2, 4, 8}) {
        const auto seconds = [&](std::optional<std::size_t> stage) {
          return plan_on_gpus(ranks, stage, clip, std::nullopt, profile, device).device_time.step;
        };
        EXPECT_LE(seconds(std::nullopt), std::min({seconds(0), seconds(1), seconds(kMostStage)}) / 0.95);
      }
}

// Parameters do not stay on the GPU, nor do gradients, to which later micro-batches add.
TEST(PlansOfRanks, OnGpusFetchThemForEachMicroBatch) {
  Profile profile = sixteen_matrices();
  profile.ends_micro_batches = true;
  const auto plan_of = [&](std::optional<std::size_t> stage, std::size_t micro_batches,
                           std::uint64_t device = 4 * kGiB) {
    profile.micro_batches = micro_batches;
    return plan_on_gpus(2, stage, true, std::nullopt, profile, device);
  };
  const Plan one = plan_of(kMostStage, 1, 160 * kMiB), many = plan_of(kMostStage, 100, 160 * kMiB);
  const std::size_t fetched = 31 * 16 * kMiB;
  EXPECT_EQ(one.step_bytes_in, fetched + 16 * 8 * kMiB)
      << "this rank's parts of means come back from the host";
  EXPECT_EQ(many.step_bytes_in, 100 * fetched + 99 * 16 * 16 * kMiB);
  EXPECT_GT(many.device_time.step, 0.95 * copy_seconds(many.step_bytes_in, 0, many.device_time.rates));
  EXPECT_EQ(plan_of(1, 100).step_bytes_in, plan_of(1, 1).step_bytes_in) << "they stay";
  EXPECT_LT(plan_of(std::nullopt, 100).one_stage(), kMostStage);
}

// A prediction with the client's computing finds the step that the plan had found.
TEST(PlansOfRanks, OnGpusArePredictedAgainWithOtherRanks) {
  const Profile profile = sixteen_matrices();
  for (const std::size_t stage : {std::size_t{0}, std::size_t{1}, kMostStage}) {
    const Plan plan = plan_on_gpus(2, stage, true, std::nullopt, profile);
    Plan again = plan;
    MachineRates rates;
    rates.rank_processor_seconds = 1e-9;
    state_computing(profile, *optim::make_optimizer({}), rates, 0.1, again);
    EXPECT_EQ(again.device_time.step, plan.device_time.step) << stage;
  }
}

}  // namespace ranks_test
}  // namespace sluice::engine
