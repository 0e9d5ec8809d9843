#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <random>
#include <regex>
#include <string>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/toy.h"

// What the plans of several ranks have to do with each other.
namespace sluice::engine {
namespace {

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

std::optional<std::uint64_t> mebibytes_after(const std::string& words, const std::string& text) {
  std::smatch found;
  if (!std::regex_search(text, found, std::regex(words + "([0-9]+)MiB"))) return std::nullopt;
  return std::stoull(found[1]) * kMiB;
}

// Shards differ, so that the memory that one rank needs may be too little for another.
TEST(PlansOfRanks, FitTheMemoryThatTheRefusalOfAnyOneNames) {
  std::mt19937 random(8);
  const auto optimizer = optim::make_optimizer({.name = "adafactor"});
  for (int round = 0; round < 40; ++round) {
    const Profile profile = matrices(random);
    const std::uint64_t disk = round % 2 == 0 ? 0 : 4 * kGiB;
    for (int refused = 0; refused < kRanks; ++refused) {
      std::string text;
      try {
        plan_of(refused, profile, *optimizer, kMiB, disk);
      } catch (const Error& error) {
        text = error.what();
      }
      const auto memory = mebibytes_after("--memory ", text);
      ASSERT_TRUE(memory) << text;
      const std::uint64_t more_disk = mebibytes_after("--disk FOLDER:", text).value_or(disk);
      for (int rank = 0; rank < kRanks; ++rank)
        EXPECT_NO_THROW(plan_of(rank, profile, *optimizer, *memory, more_disk)) << rank << ": " << text;
    }
  }
}

}  // namespace
}  // namespace sluice::engine
