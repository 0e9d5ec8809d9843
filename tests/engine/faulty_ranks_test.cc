#include "engine/faulty_ranks.h"
#include "testing.h"

// A short campaign of faults that one of several ranks meets (tests/engine/rank_fault_campaign.cc).
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

INSTANTIATE_TEST_SUITE_P(Kinds, FaultyRanks, ::testing::Range(std::size_t{0}, kFaultsOfRanks),
                         [](const auto& test) {
                           std::string name;
                           for (const char letter : std::string(kFaultNames[test.param]))
                             if (letter != ' ') name += letter;
                           return name;
                         });

}  // namespace sluice::engine::faulty::faulty_ranks_test
