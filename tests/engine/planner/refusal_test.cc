#include "core/bytes.h"
#include "core/error.h"
#include "engine/planner/largest_ranks.h"
#include "engine/planner/planner.h"
#include "engine/refused.h"
#include "engine/toy.h"
#include "testing.h"

// A refusal names the cheapest change with which there is a plan.
namespace sluice::engine::refusal_test {

// The words of the refusal; nothing where there is a plan.
std::optional<std::string> refusal(const Profile& profile, const optim::Optimizer& optimizer,
                                   const Budget& budget, const PlanRequest& request) {
  try {
    make_plan(profile, optimizer, budget, request, {});
    return std::nullopt;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kBudget) << error.what();
    return error.what();
  }
}

// The least memory, in whole MiB, with which all ranks have a plan.
std::uint64_t least_memory(const Profile& profile, const optim::Optimizer& optimizer, std::uint64_t disk,
                           PlanRequest request) {
  std::uint64_t is_short = 1, enough = 4096;
  while (enough - is_short > 1) {
    const std::uint64_t middle = (is_short + enough) / 2;
    bool all = true;
    for (request.ranks.rank = 0; all && request.ranks.rank < request.ranks.size; ++request.ranks.rank)
      all = !refusal(profile, optimizer, {middle * kMiB, disk, 0}, request);
    (all ? enough : is_short) = middle;
  }
  return enough * kMiB;
}

TEST(Refusal, NamesTheLeastMemoryAtEachStage) {
  constexpr std::uint64_t kMore = 2 * kMiB;  // it is rounded up, and has a MiB more for the next process
  const auto optimizer = optim::make_optimizer({});
  const Profile profile = toy::profile(4);
  for (const bool reproducible : {false, true})
    for (std::size_t stage = 0; stage <= kMostStage; ++stage) {
      PlanRequest request;
      request.ranks = {0, 2};
      request.stage = stage;
      request.reproducible = reproducible;
      request.flags = true;
      std::uint64_t memory = kMiB;
      for (const std::uint64_t disk : {4 * kGiB, std::uint64_t{0}}) {
        const auto text = refusal(profile, *optimizer, {memory, disk, 0}, request);
        ASSERT_TRUE(text) << memory;
        const auto named = mebibytes_after("ive --memory ", *text);
        ASSERT_TRUE(named) << *text;
        const std::uint64_t least = least_memory(profile, *optimizer, disk, request);
        EXPECT_GE(*named, least) << *text;
        EXPECT_LE(*named, least + kMore) << *text;
        memory = *named;  // is enough with a disk, and too little without
      }
    }
}

// Frames and staging of a small one may take more than all that they replace: then no disk is named.
TEST(Refusal, NamesTheLeastMemoryOfSmallModels) {
  const auto optimizer = optim::make_optimizer({});
  int without_disk = 0;
  for (const std::size_t side : {8, 256, 512, 768, 1024, 1536}) {
    Profile profile = toy::profile(1, {Dtype::kF32}, 1);
    for (UnitSpec& unit : profile.units) unit.parameters[0].shape = {side, side};
    PlanRequest request;
    request.flags = true;
    const auto text = refusal(profile, *optimizer, {1, 0, 0}, request);
    ASSERT_TRUE(text);
    const auto named = mebibytes_after("ive --memory ", *text);
    ASSERT_TRUE(named) << *text;
    const auto disk = mebibytes_after("--disk FOLDER:", *text);
    without_disk += disk ? 0 : 1;
    EXPECT_FALSE(refusal(profile, *optimizer, {*named, disk.value_or(0), 0}, request)) << *text;
    EXPECT_LE(*named, least_memory(profile, *optimizer, 4 * kGiB, request) + 2 * kMiB) << *text;
  }
  EXPECT_GT(without_disk, 0);
}

TEST(Refusal, NamesTheLeastMemoryWhereRecomputingTakesMore) {
  const auto optimizer = optim::make_optimizer({});
  Profile profile = toy::profile(1);
  for (UnitProfile& unit : profile.unit_profiles) unit.choices[1].workspace_bytes = 64 * kMiB;
  PlanRequest request;
  request.flags = true;
  const auto text = refusal(profile, *optimizer, {kMiB, 4 * kGiB, 0}, request);
  ASSERT_TRUE(text);
  const auto named = mebibytes_after("ive --memory ", *text);
  ASSERT_TRUE(named) << *text;
  EXPECT_LE(*named, least_memory(profile, *optimizer, 4 * kGiB, request) + 2 * kMiB) << *text;
}

TEST(Refusal, NamesTheLeastDiskAtEachStage) {
  const auto optimizer = optim::make_optimizer({});
  const Profile profile = toy::profile(4);
  for (std::size_t stage = 0; stage <= kMostStage; ++stage) {
    PlanRequest request;
    request.ranks = {0, 2};
    request.stage = stage;
    request.places = toy::places("disk");
    request.flags = true;
    const auto text = refusal(profile, *optimizer, {kGiB, kMiB, 0}, request);
    ASSERT_TRUE(text);
    const auto named = mebibytes_after("--disk FOLDER:", *text);
    ASSERT_TRUE(named) << *text;
    EXPECT_TRUE(refusal(profile, *optimizer, {kGiB, *named - kMiB, 0}, request)) << *text;
    EXPECT_FALSE(refusal(profile, *optimizer, {kGiB, *named, 0}, request)) << *text;
  }
}

TEST(Refusal, SaysHowManyMicroBatchesItMeans) {
  const auto optimizer = optim::make_optimizer({});
  PlanRequest request;
  request.ranks = {0, 2};
  request.stage = 1;
  const Budget none{kMiB, 4 * kGiB, 0};
  EXPECT_THAT(*refusal(toy::profile(4), *optimizer, none, request),
              testing::HasSubstr("one micro-batch at a time"));
  request.stage = 3;
  EXPECT_THAT(*refusal(toy::profile(4), *optimizer, none, request),
              testing::HasSubstr("4 micro-batches at a time"));
  request.group = 2;
  EXPECT_THAT(*refusal(toy::profile(4), *optimizer, none, request),
              testing::HasSubstr("2 micro-batches at a time"));
}

Profile matrices(std::mt19937& random) {
  Profile profile = toy::profile(2, {Dtype::kF32}, 1 + random() % 3);
  for (UnitSpec& unit : profile.units)
    unit.parameters[0].shape = {64 + random() % 4000, 64 + random() % 1500};
  return profile;
}

// Of many ranks few are looked at; nevertheless all have a plan in what the refusal names.
TEST(Refusal, OfManyRanksNamesWhatIsEnoughForAll) {
  constexpr int kRanks = 24;
  std::mt19937 random(9);
  for (const char* name : {"adafactor", "adamw", "muon"})
    for (const bool on_hosts : {false, true}) {
      const auto optimizer = optim::make_optimizer({.name = name});
      const Profile profile = matrices(random);
      const std::uint64_t disk = random() % 2 == 0 ? 0 : 4 * kGiB;
      PlanRequest request;
      request.ranks = {0, kRanks};
      for (int rank = 0; on_hosts && rank < kRanks; ++rank) request.ranks.hosts.push_back(rank / 6);
      request.stage = kMostStage;
      request.flags = true;
      EXPECT_LE(largest_ranks(profile, *optimizer, request).size(), 8u);
      request.ranks.rank = static_cast<int>(random() % kRanks);
      const auto text = refusal(profile, *optimizer, {kMiB, disk, 0}, request);
      ASSERT_TRUE(text);
      const auto memory = mebibytes_after("--memory ", *text);
      ASSERT_TRUE(memory) << *text;
      const std::uint64_t more_disk = mebibytes_after("--disk FOLDER:", *text).value_or(disk);
      for (request.ranks.rank = 0; request.ranks.rank < kRanks; ++request.ranks.rank)
        EXPECT_FALSE(refusal(profile, *optimizer, {*memory, more_disk, 0}, request))
            << name << ", rank " << request.ranks.rank << ": " << *text;
    }
}

}  // namespace sluice::engine::refusal_test
