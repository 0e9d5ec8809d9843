// Runs trainings over faulty disks until so many faults were injected. Each run must end with the bits of a
// run without faults, or with an error that names the file. tests/campaigns/run.py fault runs it:
//   fault_campaign FAULTS [SEED]
#include <unistd.h>

#include <cstdio>

#include "engine/campaign_main.h"
#include "engine/faulty_runs.h"

namespace sluice::engine::faulty {
namespace {

// A run has one kind of fault, or all kinds, with rates at which runs come far.
Faults faults_of(std::uint64_t seed) {
  const auto words =
      philox({static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32), 9, 3}, {4, 5});
  constexpr std::size_t kKindCount = std::size(kKinds);
  const std::size_t kind = words[0] % (kKindCount + 1);
  // Odd seeds have the higher rate, so that most runs meet a fault.
  const std::uint64_t random = words[1] | (words[3] % 4 == 0 ? 0 : 1);
  Faults faults;
  if (kind < kKindCount) {
    faults = kKinds[kind].make(random);
  } else {
    const double each = rate(random) / 4;
    faults.read_error = faults.write_error = faults.read_flip = faults.write_flip = faults.lost_write = each;
  }
  faults.seed = seed + 1;
  faults.delay_microseconds = kDelays[words[2] % 3];
  return faults;
}

struct Campaign {
  std::atomic<std::uint64_t> injected{0};
  std::uint64_t runs = 0, reported = 0, survived = 0, untouched = 0;
};

unsigned long long number(std::uint64_t value) { return value; }

int run(std::uint64_t wanted, std::uint64_t seed) {
  Campaign all;
  for (; all.injected < wanted; ++seed) {
    const Options setup = setup_of(seed);
    const std::string what = describe(setup, seed);
    const Watchdog watchdog(what);
    const std::uint64_t before = all.injected;
    const Ending ending = run_with(setup, faults_of(seed), base_of(setup), &all.injected);
    ++all.runs;
    if (!ending.defect.empty()) {
      std::printf("\nnot reported, or not rightly: %s\n%s\n", what.c_str(), ending.defect.c_str());
      return 1;
    }
    const bool hit = all.injected > before;
    if (!ending.well && !hit) {
      std::printf("\na run without faults failed: %s\n%s\n", what.c_str(), ending.error.c_str());
      return 1;
    }
    all.untouched += hit ? 0 : 1;
    all.survived += hit && ending.well ? 1 : 0;
    all.reported += ending.well ? 0 : 1;
    if (all.runs % 50 == 0 && ::isatty(STDOUT_FILENO) != 0) {
      std::printf("\r%llu faults in %llu runs", number(all.injected), number(all.runs));
      std::fflush(stdout);
    }
  }
  std::printf(
      "%s%llu faults in %llu runs: %llu ended with an error that names the file, %llu with the same bits "
      "although something went wrong, %llu met none\n",
      ::isatty(STDOUT_FILENO) != 0 ? "\r" : "", number(all.injected), number(all.runs), number(all.reported),
      number(all.survived), number(all.untouched));
  return 0;
}

}  // namespace
}  // namespace sluice::engine::faulty

int main(int count, char** words) {
  return sluice::engine::faulty::campaign_main(count, words, "FAULTS", sluice::engine::faulty::run);
}
