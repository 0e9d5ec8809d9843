#include "engine/plan/cut.h"

#include "testing.h"
#include "thrown.h"

namespace sluice::engine::cut_test {

const Fits kAllFit = [](int, UnitRange) { return true; };

double time_of(const Pipeline& pipeline, std::span<const SectionSeconds> seconds,
               std::span<const UnitRange> cut) {
  std::vector<SectionSeconds> sections;
  for (const UnitRange& range : cut) {
    SectionSeconds sum;
    for (UnitId unit = range.first; unit < range.end; ++unit) {
      sum.forward += seconds[unit].forward;
      sum.backward += seconds[unit].backward;
      sum.weights += seconds[unit].weights;
      sum.message = seconds[unit].message;
    }
    sections.push_back(sum);
  }
  return simulate(pipeline, sections).step;
}

// The least time of all cuts that fit, by trying each.
double best_time(const Pipeline& pipeline, std::span<const SectionSeconds> seconds, const Fits& fits,
                 std::vector<UnitRange> begun = {}) {
  const auto units = static_cast<UnitId>(seconds.size());
  const UnitId first = begun.empty() ? 0 : begun.back().end;
  const int section = static_cast<int>(begun.size());
  double best = std::numeric_limits<double>::infinity();
  begun.emplace_back();
  // Each section has a block: unit 0 is none, and neither is the last one.
  for (UnitId end = std::max<UnitId>(first, 1) + 1; end <= units; ++end) {
    if (end == units && first + 1 == units) continue;
    begun.back() = {first, end};
    if (!fits(section, begun.back())) continue;
    if (section + 1 == pipeline.sections) {
      if (end == units) best = std::min(best, time_of(pipeline, seconds, begun));
    } else {
      best = std::min(best, best_time(pipeline, seconds, fits, begun));
    }
  }
  return best;
}

void expect_cut(const Pipeline& pipeline, std::span<const UnitRange> cut, std::size_t units) {
  ASSERT_EQ(cut.size(), static_cast<std::size_t>(pipeline.sections));
  EXPECT_EQ(cut.front().first, 0u);
  EXPECT_EQ(cut.back().end, units);
  for (std::size_t s = 1; s < cut.size(); ++s) EXPECT_EQ(cut[s].first, cut[s - 1].end);
  EXPECT_GE(cut.front().size(), 2u);
  EXPECT_GE(cut.back().size(), 2u);
}

// Equal blocks between an embedding that costs little and a head that costs much, all of it in backward.
std::vector<SectionSeconds> transformer(std::size_t blocks, double head) {
  std::vector<SectionSeconds> seconds(blocks, {1, 2, 0.02, 1});
  seconds.insert(seconds.begin(), {0.05, 0.05, 0.02});
  seconds.push_back({0, head, 0.02});
  return seconds;
}

TEST(Cut, OfATransformerIsTheBestOfAll) {
  for (const PipelineOrder order :
       {PipelineOrder::kGPipe, PipelineOrder::k1F1B, PipelineOrder::kZeroBubbleH1})
    for (int sections = 1; sections <= 4; ++sections)
      for (std::size_t blocks = static_cast<std::size_t>(sections); blocks <= 8; ++blocks)
        for (const double head : {0.5, 4.0, 11.0}) {
          const Pipeline pipeline{order, sections, 8};
          const std::vector<SectionSeconds> seconds = transformer(blocks, head);
          const std::vector<UnitRange> found = cut(pipeline, seconds, kAllFit);
          expect_cut(pipeline, found, seconds.size());
          EXPECT_DOUBLE_EQ(time_of(pipeline, seconds, found), best_time(pipeline, seconds, kAllFit))
              << sections << " sections, " << blocks << " blocks, a head of " << head << ": "
              << to_text(found);
        }
}

// Units have any cost, and not all cuts fit.
TEST(Cut, OfAnyUnitsIsNearTheBestThatFits) {
  std::mt19937_64 random(3);
  const auto draw = [&](std::size_t end) { return static_cast<double>(random() % end); };
  int without = 0;
  double worst = 1;
  for (int trial = 0; trial < 200; ++trial) {
    const Pipeline pipeline{trial % 2 == 0 ? PipelineOrder::k1F1B : PipelineOrder::kGPipe, 2 + trial % 3, 6};
    std::vector<SectionSeconds> seconds;
    for (int unit = 0; unit < 9; ++unit) seconds.push_back({1 + draw(6), 1 + draw(12), 0.1});
    const std::size_t most = 3 + random() % 4;
    const Fits fits = [&](int section, UnitRange units) {
      return units.size() <= most - static_cast<std::size_t>(section % 2);
    };
    const std::vector<UnitRange> found = cut(pipeline, seconds, fits);
    const double best = best_time(pipeline, seconds, fits);
    if (found.empty()) {
      EXPECT_EQ(best, std::numeric_limits<double>::infinity());
      ++without;
      continue;
    }
    expect_cut(pipeline, found, seconds.size());
    for (std::size_t s = 0; s < found.size(); ++s) EXPECT_TRUE(fits(static_cast<int>(s), found[s]));
    worst = std::max(worst, time_of(pipeline, seconds, found) / best);
  }
  EXPECT_GT(without, 10);
  EXPECT_LT(without, 150);
  EXPECT_LE(worst, 1.05);
}

// The head takes as long as five blocks, as that of GPT-2 124M does.
TEST(Cut, CountsTheHead) {
  EXPECT_EQ(to_text(cut({PipelineOrder::k1F1B, 2, 8}, transformer(12, 15.5), kAllFit)), "0-8,9-11");
}

TEST(Cut, IsReadAndWritten) {
  for (const char* text : {"0-15", "0-7,8-15", "0,1,2-15", "0-3,4-7,8-11,12-15"}) {
    const std::vector<UnitRange> read = parse_cut(text, 16);
    EXPECT_EQ(to_text(read), text);
    expect_cut({.sections = static_cast<int>(read.size())}, read, 18);
  }
  EXPECT_EQ(parse_cut("0-1,2", 3), (std::vector<UnitRange>{{0, 3}, {3, 5}}));
}

TEST(Cut, IsRefusedWhereItIsNone) {
  const auto refusal = [](const char* text) { return message_of([&] { parse_cut(text, 4); }); };
  for (const char* part : {"", "a", "0-", "-3", "0-x", "0 - 3", "0-1-3"})
    EXPECT_NE(refusal(part).find("where the number of a block must be: give it as 0-7,8-15"),
              std::string::npos)
        << refusal(part);
  EXPECT_EQ(
      refusal("0-1,3"),
      "the cut '0-1,3' has '3' where blocks from 2 on must be: the model has the blocks 0 to 3, each in one "
      "stage, in their order");
  for (const char* text : {"1-3", "0-2,2-3", "2-3,0-1", "0-4", "1-0,2-3", "0-1,2-1"})
    EXPECT_NE(refusal(text).find("each in one stage, in their order"), std::string::npos) << refusal(text);
  EXPECT_EQ(refusal("0,1,2,3,4"),
            "the cut '0,1,2,3,4' goes on with '4' after block 3, which is the model's last one");
  EXPECT_EQ(refusal("0,1-2"), "the cut '0,1-2' ends with block 2, and the model has the blocks 0 to 3");
}

}  // namespace sluice::engine::cut_test
