#include "engine/checkpoint/best_checkpoint.h"
#include "testing.h"

namespace sluice::engine::best_checkpoint_test {

const Json kJudge = {{"batches", 8}, {"data_fingerprint", "0123456789abcdef"}, {"windows", 12}};
const Json kOther = {{"batches", 9}, {"data_fingerprint", "0123456789abcdef"}, {"windows", 12}};

Json judged(double loss, const Json& judge = kJudge) {
  return {{"validation", validation_record(loss, judge)}};
}

// Makes checkpoints of steps 10, 20, ... with these records.
CheckpointList list_of(std::vector<Json> records) {
  CheckpointList list;
  for (Json& record : records) {
    const std::uint64_t step = 10 * (list.whole.size() + 1);
    list.whole.push_back({step, "run/step-" + std::to_string(step), std::move(record)});
  }
  return list;
}

std::uint64_t best_step(const std::vector<Json>& records) {
  const auto best = best_checkpoint(list_of(records));
  return best ? best->step : 0;
}

TEST(BestCheckpointTest, IsNeverOneWhoseLossIsNotFinite) {
  const double nan = std::nan(""), infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(best_step({judged(nan), judged(7), judged(-infinity), judged(nan)}), 20u);
  EXPECT_EQ(best_step({judged(nan), judged(infinity)}), 0u);
}

TEST(BestCheckpointTest, IsNoneWhereNoneWasJudged) {
  EXPECT_EQ(best_step({}), 0u);
  EXPECT_EQ(best_step({{{"validation", nullptr}},
                       Json::object(),
                       nullptr,
                       "text",
                       {{"validation", 3}},
                       {{"validation", {{"loss", "low"}}}},
                       {{"validation", {{"loss", true}}}}}),
            0u);
  EXPECT_EQ(best_step({judged(3), {{"validation", nullptr}}}), 10u);
}

TEST(BestCheckpointTest, IsAmongThoseOfTheNewestJudge) {
  EXPECT_EQ(best_step({judged(1), judged(3, kOther), judged(4, kOther)}), 20u);
  EXPECT_EQ(best_step({judged(1), judged(3, kOther), judged(2), {{"validation", nullptr}}}), 10u);
  const auto list = list_of({judged(1), judged(std::nan(""), kOther)});
  EXPECT_FALSE(was_judged_otherwise(list, kJudge));
  EXPECT_TRUE(was_judged_otherwise(list, kOther));
}

}  // namespace sluice::engine::best_checkpoint_test
