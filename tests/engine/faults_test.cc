// A campaign of faults, short or as long as is asked for, and other failures in an engine.

#include "engine/faulty_runs.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::engine::faults_test {

using namespace sluice::engine::faulty;  // NOLINT: this file is of these runs

class FaultsTest : public testing::TestWithParam<Kind> {};

TEST_P(FaultsTest, ARunEndsWithTheSameBitsOrFails) {
  constexpr std::uint64_t kRuns = 24;
  std::uint64_t well = 0;
  for (std::uint64_t seed = 0; seed < kRuns; ++seed) {
    const Options setup = setup_of(seed);
    const std::string what = describe(setup, seed);
    SCOPED_TRACE(what);
    const Watchdog watchdog(what);
    Faults faults = GetParam().make(philox({static_cast<std::uint32_t>(seed), 1, 2, 3}, {4, 5})[0]);
    faults.seed = seed + 1;
    faults.delay_microseconds = kDelays[seed % 3];
    const Ending ending = run_with(setup, faults, base_of(setup));
    EXPECT_EQ(ending.defect, "");
    well += ending.well ? 1 : 0;
  }
  EXPECT_GT(well, 0u) << "no run came through";
  EXPECT_LT(well, kRuns) << "nothing went wrong";
}

INSTANTIATE_TEST_SUITE_P(Kinds, FaultsTest, testing::ValuesIn(kKinds),
                         [](const auto& test) { return std::string(test.param.name); });

// A run has one kind of fault, or all kinds, with rates at which runs come far.
Faults any_faults(std::uint64_t seed) {
  const auto words =
      philox({static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32), 9, 3}, {4, 5});
  constexpr std::size_t kKindCount = std::size(kKinds);
  const std::size_t kind = words[0] % (kKindCount + 1);
  // Odd numbers have the higher rate, so that most runs meet a fault.
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

class FaultCampaign : public testing::TestWithParam<std::uint64_t> {};  // how many faults
INSTANTIATE_TEST_SUITE_P(Long, FaultCampaign, testing::Values(200));

TEST_P(FaultCampaign, EachRunEndsWithTheSameBitsOrFails) {
  auto [wanted, seed] = asked_or(GetParam());
  std::atomic<std::uint64_t> injected{0};
  std::uint64_t runs = 0, reported = 0, survived = 0;
  for (; injected < wanted && !HasFailure(); ++seed, ++runs) {
    const Options setup = setup_of(seed);
    const std::string what = describe(setup, seed);
    SCOPED_TRACE(what);
    const Watchdog watchdog(what);
    const std::uint64_t before = injected;
    const Ending ending = run_with(setup, any_faults(seed), base_of(setup), &injected);
    EXPECT_EQ(ending.defect, "");
    EXPECT_TRUE(ending.well || injected > before) << "a run without faults failed: " << ending.error;
    survived += ending.well && injected > before ? 1 : 0;
    reported += ending.well ? 0 : 1;
  }
  fmt::print(
      "{} faults in {} runs: {} ended with an error that names the file, {} with the same bits although "
      "something went wrong, {} met none\n",
      injected.load(), runs, reported, survived, runs - reported - survived);
}

TEST(EngineFailureTest, ASourceThatThrowsLeavesTheEngineWhole) {
  const Model model(Options{});
  Threads threads(1);
  allocator::Ledger ledger;
  Disks disks(Faults{});
  offload::RecordStore store(std::move(disks.faulty), ledger);
  ScheduledEngine engine(model.profile, model.plan, *model.optimizer, {threads, ledger, &store, nullptr});
  UnitSource source;
  source.values = [](ParameterId, std::size_t, std::span<float>) {
    throw std::runtime_error("no such tensor");
  };
  EXPECT_THROW(engine.load(0, source), std::runtime_error);
  for (UnitId unit = 0; unit < model.profile.units.size(); ++unit) engine.load(unit, toy::start_values());
  toy::Trainer trainer(model.profile, model.plan, engine);
  EXPECT_GT(trainer.step(toy::settings(0.01, 0.1, 0)), 0);
}

TEST(EngineFailureTest, AnEngineThatDoesNotFitIsNotMade) {
  const Model model(Options{});
  Threads threads(1);
  std::uint64_t needed = 0;  // what the engine alone takes; the plan's peak also has model and process
  {
    allocator::Ledger ledger;
    Disks disks(Faults{});
    offload::RecordStore store(std::move(disks.faulty), ledger);
    const ScheduledEngine engine(model.profile, model.plan, *model.optimizer,
                                 {threads, ledger, &store, nullptr});
    needed = ledger.snapshot().total[static_cast<std::size_t>(allocator::Tier::kHost)].peak;
  }
  for (std::uint64_t budget = 0; budget < needed; budget += needed / 8 + 1) {
    allocator::Ledger ledger;
    Disks disks(Faults{});
    offload::RecordStore store(std::move(disks.faulty), ledger);
    ledger.set_budget(allocator::Tier::kHost, budget);
    SCOPED_TRACE(budget);
    expect_error(ErrorCode::kBudget, {}, [&] {
      ScheduledEngine(model.profile, model.plan, *model.optimizer, {threads, ledger, &store, nullptr});
    });
  }
}

}  // namespace sluice::engine::faults_test
