#include "engine/faulty_ranks.h"
#include "testing.h"

// A campaign of faults that one of several ranks meets, short or as long as is asked for.
namespace sluice::engine::faulty::faulty_ranks_test {

class FaultyRanks : public ::testing::TestWithParam<std::size_t> {};

TEST_P(FaultyRanks, EndWithTheSameBitsOrAllNameTheOneThatFailedFirst) {
  for (std::uint64_t seed = 0; seed < 2; ++seed) {
    const RankSetup setup = rank_setup_of(seed);
    RankFault fault = rank_fault_of(seed + 100 * GetParam(), setup);
    fault.kind = static_cast<FaultOfRank>(GetParam());
    const std::string what = describe(setup, fault, seed);
    SCOPED_TRACE(what);
    const Watchdog watchdog(what);
    const RanksEnding ending = run_with(setup, fault);
    EXPECT_EQ(ending.defect, "") << "rank " << fault.rank << " said: " << ending.error;
    const bool is_harmless = fault.kind == FaultOfRank::kSlowDisk || fault.kind == FaultOfRank::kSlowLink;
    if (is_harmless) {
      EXPECT_EQ(ending.error, "");
    }
    if (is_harmless || !ending.well) break;  // where the first run met its fault, the second shows no more
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, FaultyRanks, ::testing::Range(std::size_t{0}, std::size(kFaultsOfRanks)),
                         [](const auto& test) {
                           std::string name;
                           for (const char letter : std::string(kFaultsOfRanks[test.param].name))
                             if (letter != ' ') name += letter;
                           return name;
                         });

class RankFaultCampaign : public ::testing::TestWithParam<std::uint64_t> {};  // how many runs
INSTANTIATE_TEST_SUITE_P(Long, RankFaultCampaign, ::testing::Values(20));

TEST_P(RankFaultCampaign, EachRunEndsWithTheSameBitsOrAllNameTheOneThatFailedFirst) {
  auto [rounds, seed] = asked_or(GetParam());
  std::array<std::uint64_t, std::size(kFaultsOfRanks)> well{}, reported{};
  for (const std::uint64_t end = seed + rounds; seed < end && !HasFailure(); ++seed) {
    const RankSetup setup = rank_setup_of(seed);
    const RankFault fault = rank_fault_of(seed, setup);
    const std::string what = describe(setup, fault, seed);
    SCOPED_TRACE(what);
    const Watchdog watchdog(what);
    const RanksEnding ending = run_with(setup, fault);
    EXPECT_EQ(ending.defect, "") << "rank " << fault.rank << " said: " << ending.error;
    ++(ending.well ? well : reported)[static_cast<std::size_t>(fault.kind)];
  }
  fmt::print("{} runs; ended with the same bits | with an error of all ranks, from which they went on:\n",
             rounds);
  for (std::size_t kind = 0; kind < std::size(kFaultsOfRanks); ++kind)
    fmt::print("{:6} | {:6}  {}\n", well[kind], reported[kind], kFaultsOfRanks[kind].name);
}

}  // namespace sluice::engine::faulty::faulty_ranks_test
