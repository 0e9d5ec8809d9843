#include "engine/planner/planner.h"
#include "engine/refused.h"
#include "engine/scheduled_ranks.h"
#include "testing.h"
#include "thrown.h"

// Plans of ranks at random, each in the least memory and on the least disk with which the plan says that it
// can do: nobody waits for ever, no frame is missing, and the bits are those of ranks that have everything in
// memory.
namespace sluice::engine::ranks_sweep_test {

using scheduled::Case;
using scheduled::Where;

template <class Value>
Value one_of(std::mt19937& random, std::initializer_list<Value> values) {
  return values.begin()[random() % values.size()];
}

Case random_case(std::mt19937& random) {
  Case c;
  c.optimizer.name = one_of(random, {"adamw", "adamw", "adam", "lion", "sgd", "adafactor", "muon"});
  if (c.optimizer.name == "sgd") c.optimizer.settings = {{"momentum", 0.9}};
  c.dtype = one_of(random, {Dtype::kF32, Dtype::kBf16});
  const bool has_codes = c.optimizer.name != "adafactor" && c.optimizer.name != "muon";
  c.optimizer.storage.state =
      one_of(random, {Dtype::kF32, Dtype::kBf16, has_codes ? Dtype::kU8 : Dtype::kF32});
  c.optimizer.storage.master = c.dtype == Dtype::kF32 || random() % 3 != 0;
  c.clip = one_of(random, {0.0, 1.0});
  c.micro_batches = one_of(random, {1u, 2u, 3u});
  c.group = random() % 2 == 0 ? std::nullopt : std::optional<std::size_t>(1 + random() % c.micro_batches);
  c.reproducible = random() % 4 == 0;
  return c;
}

Where random_where(std::mt19937& random) {
  Where where{.stage = std::nullopt, .pieces = SIZE_MAX};
  if (random() % 3 != 0) where.stage = random() % (kMostStage + 1);
  if (random() % 3 == 0)
    for (int unit = 0; unit < 4; ++unit) where.stages.push_back(random() % (kMostStage + 1));
  for (auto& place : where.places)
    place = one_of(random, {std::optional<allocator::Tier>(), std::optional(kCpuTier),
                            std::optional(allocator::Tier::kDisk)});
  return where;
}

// The least that the refusal of a plan in hardly any memory names.
void take_least(const Case& c, int ranks, Where& where) {
  const auto optimizer = optim::make_optimizer(c.optimizer);
  const std::string text = thrown_by([&] {
                             make_plan(scheduled::profile_of(c), *optimizer, {kMiB, kGiB, 0},
                                       scheduled::request_of(c, where, {0, ranks}), scheduled::rates());
                           }).text;
  where.memory = mebibytes_after("--memory ", text).value_or(0);
  where.disk = mebibytes_after("--disk FOLDER:", text).value_or(kGiB);
  ASSERT_GT(where.memory, 0u) << text;
}

TEST(RanksSweep, PlansInTheLeastMemoryHaveTheBitsOfRanksInMemory) {
  constexpr int kPlans = 6, kSteps = 2;
  std::mt19937 random(20);
  for (int plan = 0; plan < kPlans; ++plan) {
    const Case c = random_case(random);
    const int ranks = 1 + static_cast<int>(random() % 4);
    Where where = random_where(random);
    SCOPED_TRACE(fmt::format("plan {}: {}, {} ranks, stage {}, stages {}", plan, testing::PrintToString(c),
                             ranks, where.stage ? static_cast<int>(*where.stage) : -1,
                             testing::PrintToString(where.stages)));
    ASSERT_NO_FATAL_FAILURE(take_least(c, ranks, where));
    const Where whole{.stage = 0, .places = toy::places("memory"), .pieces = SIZE_MAX};
    const auto least = scheduled::train_all(ranks, c, where, kSteps);
    // The statistics that an optimizer keeps of a whole parameter come besides.
    const bool sums_up = c.optimizer.name == "adafactor" || c.optimizer.name == "muon";
    for (const scheduled::Ran& ran : least) {
      // The plan counts one read for an update and for the access that follows it. In the least memory values
      // that were updated ahead of that may have to leave again before.
      EXPECT_LE(ran.read, ran.planned_read_apart + ran.parameters_on_disk);
      if (!sums_up) {
        EXPECT_LE(ran.received, ran.planned_received);
      }
    }
    EXPECT_TRUE(least[0].outcome == scheduled::train_all(ranks, c, whole, kSteps)[0].outcome);
  }
}

}  // namespace sluice::engine::ranks_sweep_test
