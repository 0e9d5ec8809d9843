#include "allocator/timeline.h"

#include "allocator/ledger.h"
#include "testing.h"

namespace sluice::allocator::timeline_test {

using Two = Timeline<2>;
using std::chrono::milliseconds;

std::uint64_t sum(const Two::Held& held) { return held[0] + held[1]; }

TEST(TimelineTest, WhatIsHeldIsKeptByPartsOfTime) {
  const auto begin = Two::Clock::now();
  Two timeline(8, begin);
  timeline.note(begin, {5, 0});
  timeline.note(begin + milliseconds(3), {5, 7});
  timeline.note(begin + milliseconds(3), {1, 0});
  const auto parts = timeline.parts();
  ASSERT_EQ(parts.size(), 2u);
  EXPECT_EQ(parts[0].most, (Two::Held{5, 0}));
  EXPECT_EQ(parts[1].begin, begin + milliseconds(3));
  EXPECT_EQ(parts[1].end, begin + milliseconds(4));
  EXPECT_EQ(parts[1].most, (Two::Held{5, 7}));
  EXPECT_EQ(parts[1].last, (Two::Held{1, 0}));
}

TEST(TimelineTest, NoPeakIsLostHoweverLongItRuns) {
  const auto begin = Two::Clock::now();
  Two timeline(16, begin);
  std::mt19937 random(3);
  std::uint64_t peak = 0;
  Two::Held held = {};
  for (int i = 0; i < 20000; ++i) {
    held = {random() % 1000, random() % 1000};
    peak = std::max(peak, sum(held));
    timeline.note(begin + milliseconds(7) * i, held);
  }
  const auto parts = timeline.parts();
  EXPECT_LE(parts.size(), 16u);
  EXPECT_GE(parts.size(), 8u);
  std::uint64_t most = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    most = std::max(most, sum(parts[i].most));
    EXPECT_GE(sum(parts[i].most), sum(parts[i].last));
    if (i > 0) {
      EXPECT_GE(parts[i].begin, parts[i - 1].end);
    }
  }
  EXPECT_EQ(most, peak);
  EXPECT_EQ(parts.back().last, held);
}

TEST(TimelineTest, APartBeginsWithWhatWasHeldBeforeIt) {
  const auto begin = Two::Clock::now();
  Two timeline(8, begin);
  timeline.note(begin, {100, 0});
  timeline.note(begin + milliseconds(5), {1, 0});
  EXPECT_EQ(timeline.parts().back().most, (Two::Held{100, 0}));
}

TEST(TimelineTest, ALedgerKeepsItsTimeline) {
  Ledger ledger;
  EXPECT_TRUE(ledger.timeline(Tier::kHost).empty());
  ledger.charge(Tier::kHost, Purpose::kBase, 10);
  ledger.record(64, std::chrono::steady_clock::now());
  {
    const Charge charge(ledger, Tier::kHost, Purpose::kStaging, 30);
    ledger.move(Tier::kHost, Purpose::kStaging, Purpose::kGradient, 20);
    ledger.move(Tier::kHost, Purpose::kGradient, Purpose::kStaging, 20);
  }
  ledger.charge(Tier::kDisk, Purpose::kParameter, 7);
  const auto index = [](Purpose purpose) { return static_cast<std::size_t>(purpose); };
  std::uint64_t most = 0;
  for (const auto& part : ledger.timeline(Tier::kHost)) {
    std::uint64_t all = 0;
    for (const std::uint64_t bytes : part.most) all += bytes;
    most = std::max(most, all);
  }
  EXPECT_EQ(most, 40u);
  EXPECT_EQ(ledger.timeline(Tier::kHost).back().last[index(Purpose::kBase)], 10u);
  EXPECT_EQ(ledger.timeline(Tier::kHost).back().last[index(Purpose::kStaging)], 0u);
  EXPECT_EQ(ledger.timeline(Tier::kDisk).back().last[index(Purpose::kParameter)], 7u);
}

}  // namespace sluice::allocator::timeline_test
