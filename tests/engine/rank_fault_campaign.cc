// Lets one rank of each of so many runs meet a fault (tests/engine/faulty_ranks.h):
//   rank_fault_campaign ROUNDS [SEED]
#include <unistd.h>

#include <cstdio>

#include "engine/campaign_main.h"
#include "engine/faulty_ranks.h"

namespace sluice::engine::faulty {
namespace {

int run(std::uint64_t rounds, std::uint64_t seed) {
  std::array<std::uint64_t, kFaultsOfRanks> well{}, reported{};
  for (std::uint64_t end = seed + rounds; seed < end; ++seed) {
    const RankSetup setup = rank_setup_of(seed);
    const RankFault fault = rank_fault_of(seed, setup);
    const std::string what = describe(setup, fault, seed);
    const Watchdog watchdog(what);
    const RanksEnding ending = run_with(setup, fault);
    if (!ending.defect.empty()) {
      std::printf("\nnot as it should be: %s\n%s(rank %d said: %s)\n", what.c_str(), ending.defect.c_str(),
                  fault.rank, ending.error.c_str());
      return 1;
    }
    ++(ending.well ? well : reported)[static_cast<std::size_t>(fault.kind)];
    if (::isatty(STDOUT_FILENO) != 0) {
      std::printf("\r%llu rounds left ", static_cast<unsigned long long>(end - seed - 1));
      std::fflush(stdout);
    }
  }
  std::printf(
      "%llu rounds; ended with the same bits | with an error of all ranks, from which they went on:\n",
      static_cast<unsigned long long>(rounds));
  for (std::size_t kind = 0; kind < kFaultsOfRanks; ++kind)
    std::printf("%6llu | %6llu  %s\n", static_cast<unsigned long long>(well[kind]),
                static_cast<unsigned long long>(reported[kind]), kFaultNames[kind]);
  return 0;
}

}  // namespace
}  // namespace sluice::engine::faulty

int main(int count, char** words) {
  return sluice::engine::faulty::campaign_main(count, words, "ROUNDS", sluice::engine::faulty::run);
}
