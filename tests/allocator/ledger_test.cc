#include "allocator/ledger.h"

#include "core/error.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::allocator::ledger_test {

ErrorCode code_of(const std::function<void()>& call) { return thrown_by(call).code; }

Ledger::Line line(const Ledger& ledger, Tier tier, Purpose purpose) {
  return ledger.snapshot().lines[static_cast<std::size_t>(tier)][static_cast<std::size_t>(purpose)];
}
Ledger::Line total(const Ledger& ledger, Tier tier) {
  return ledger.snapshot().total[static_cast<std::size_t>(tier)];
}

TEST(Ledger, NamesTiersAndPurposes) {
  EXPECT_EQ(name_of(Tier::kDevice), "device");
  EXPECT_EQ(name_of(Tier::kHost), "host");
  EXPECT_EQ(name_of(Tier::kDisk), "disk");
  EXPECT_EQ(name_of(Purpose::kParameter), "parameter");
  EXPECT_EQ(name_of(Purpose::kOptimizerState), "optimizer state");
  EXPECT_EQ(name_of(Purpose::kBase), "base");
}

TEST(Ledger, KeepsCurrentAndPeakPerLineAndTier) {
  Ledger ledger;
  ledger.charge(Tier::kHost, Purpose::kGradient, 100);
  ledger.charge(Tier::kHost, Purpose::kStaging, 50);
  ledger.discharge(Tier::kHost, Purpose::kGradient, 80);
  ledger.charge(Tier::kHost, Purpose::kStaging, 10);
  ledger.charge(Tier::kDisk, Purpose::kStaging, 7);
  EXPECT_EQ(line(ledger, Tier::kHost, Purpose::kGradient).current, 20u);
  EXPECT_EQ(line(ledger, Tier::kHost, Purpose::kGradient).peak, 100u);
  EXPECT_EQ(line(ledger, Tier::kHost, Purpose::kStaging).peak, 60u);
  EXPECT_EQ(total(ledger, Tier::kHost).current, 80u);
  EXPECT_EQ(total(ledger, Tier::kHost).peak, 150u);
  EXPECT_EQ(total(ledger, Tier::kDisk).current, 7u);
}

TEST(Ledger, RefusalNamesEverythingAndChangesNothing) {
  Ledger ledger;
  ledger.set_budget(Tier::kHost, 1000);
  ledger.charge(Tier::kHost, Purpose::kParameter, 700);
  expect_error(ErrorCode::kBudget, {"host", "activation", "301", "700", "1000"},
               [&] { ledger.charge(Tier::kHost, Purpose::kActivation, 301); });
  EXPECT_EQ(line(ledger, Tier::kHost, Purpose::kActivation).peak, 0u);
  EXPECT_EQ(total(ledger, Tier::kHost).peak, 700u);
  ledger.charge(Tier::kHost, Purpose::kActivation, 300);
  EXPECT_EQ(total(ledger, Tier::kHost).current, 1000u);
}

TEST(Ledger, SumsThatOverflowAreRefused) {
  Ledger ledger;
  ledger.charge(Tier::kDisk, Purpose::kStaging, 10);
  EXPECT_EQ(code_of([&] {
              ledger.charge(Tier::kDisk, Purpose::kStaging, std::numeric_limits<std::uint64_t>::max());
            }),
            ErrorCode::kBudget);
  EXPECT_EQ(total(ledger, Tier::kDisk).current, 10u);
}

TEST(Ledger, BudgetBelowWhatIsHeldIsRefused) {
  Ledger ledger;
  ledger.charge(Tier::kHost, Purpose::kStaging, 10);
  EXPECT_EQ(code_of([&] { ledger.set_budget(Tier::kHost, 9); }), ErrorCode::kBudget);
  EXPECT_FALSE(ledger.snapshot().budget[static_cast<std::size_t>(Tier::kHost)].has_value());
  ledger.set_budget(Tier::kHost, 10);
  EXPECT_EQ(ledger.snapshot().budget[static_cast<std::size_t>(Tier::kHost)], 10u);
}

TEST(Ledger, MovingIsNeverRefusedForTheBudget) {
  Ledger ledger;
  ledger.set_budget(Tier::kHost, 100);
  ledger.charge(Tier::kHost, Purpose::kParameter, 100);
  ledger.move(Tier::kHost, Purpose::kParameter, Purpose::kGradient, 60);
  EXPECT_EQ(line(ledger, Tier::kHost, Purpose::kParameter).current, 40u);
  EXPECT_EQ(line(ledger, Tier::kHost, Purpose::kGradient).peak, 60u);
  EXPECT_EQ(total(ledger, Tier::kHost).peak, 100u);
  ledger.move(Tier::kHost, Purpose::kGradient, Purpose::kGradient, 60);
  EXPECT_EQ(line(ledger, Tier::kHost, Purpose::kGradient).peak, 60u);
}

TEST(Ledger, DischargingMoreThanIsHeldIsADefect) {
  Ledger ledger;
  ledger.charge(Tier::kHost, Purpose::kParameter, 5);
  ledger.charge(Tier::kHost, Purpose::kGradient, 50);
  EXPECT_EQ(code_of([&] { ledger.discharge(Tier::kHost, Purpose::kParameter, 6); }), ErrorCode::kInternal);
  EXPECT_EQ(code_of([&] { ledger.move(Tier::kHost, Purpose::kParameter, Purpose::kGradient, 6); }),
            ErrorCode::kInternal);
  EXPECT_EQ(line(ledger, Tier::kHost, Purpose::kParameter).current, 5u);
}

TEST(Ledger, ThreadsBalance) {
  Ledger ledger;
  ledger.set_budget(Tier::kHost, 4 * 3);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (int k = 0; k < 10'000; ++k) const Charge charge(ledger, Tier::kHost, Purpose::kWorkspace, 3);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(total(ledger, Tier::kHost).current, 0u);
  EXPECT_LE(total(ledger, Tier::kHost).peak, 12u);
  EXPECT_GE(total(ledger, Tier::kHost).peak, 3u);
}

TEST(Charge, LastsAsLongAsItsOwner) {
  Ledger ledger;
  {
    Charge first(ledger, Tier::kDisk, Purpose::kCheckpoint, 8);
    Charge second = std::move(first);
    EXPECT_EQ(second.bytes(), 8u);
    EXPECT_EQ(total(ledger, Tier::kDisk).current, 8u);
    Charge third(ledger, Tier::kDisk, Purpose::kCheckpoint, 4);
    third = std::move(second);
    EXPECT_EQ(total(ledger, Tier::kDisk).current, 8u);
    third = Charge();
    EXPECT_EQ(total(ledger, Tier::kDisk).current, 0u);
  }
  EXPECT_EQ(total(ledger, Tier::kDisk).current, 0u);
}

TEST(Charge, RefusedChargeOwesNothing) {
  Ledger ledger;
  ledger.set_budget(Tier::kDisk, 1);
  EXPECT_THROW(Charge(ledger, Tier::kDisk, Purpose::kCheckpoint, 2), Error);
  EXPECT_EQ(total(ledger, Tier::kDisk).current, 0u);
}

}  // namespace sluice::allocator::ledger_test
