#include "engine/steps/recorder.h"

#include <gtest/gtest.h>

#include <random>

namespace sluice::engine {
namespace recorder_test {

Access reading(UnitId unit) { return {unit, true, -1, false}; }
Access final_gradient(UnitId unit) { return {unit, true, 0, true}; }

void record(Recorder& recorder, const std::vector<Access>& step) {
  recorder.begin_step();
  for (const Access& access : step) recorder.follow(access, true);
  EXPECT_EQ(recorder.end_step(), step);
}

TEST(Recorder, FollowsAStepThatIsLikeTheOneBefore) {
  const std::vector<Access> step = {reading(0), reading(1), final_gradient(1), final_gradient(0)};
  Recorder recorder;
  record(recorder, step);
  for (int again = 0; again < 2; ++again) {
    recorder.begin_step();
    for (std::size_t i = 0; i < step.size(); ++i) EXPECT_EQ(recorder.follow(step[i], true), i);
    recorder.end_step();
  }
}

TEST(Recorder, GoesOnBehindWhatIsLeftOutAndStaysWhereSomethingIsNew) {
  Recorder recorder;
  record(recorder, {reading(0), reading(1), reading(2), reading(1), final_gradient(2)});
  recorder.begin_step();
  EXPECT_EQ(recorder.follow(reading(7), true), 0u) << "nothing was expected of that unit";
  EXPECT_EQ(recorder.follow(reading(1), true), 1u);
  EXPECT_EQ(recorder.follow(reading(0), true), 2u) << "that is over";
  EXPECT_EQ(recorder.follow(reading(1), true), 3u) << "the second time";
  EXPECT_EQ(recorder.follow(reading(2), true), 4u) << "another access of that unit";
  EXPECT_EQ(recorder.follow(final_gradient(2), true), 4u);
  EXPECT_EQ(recorder.follow(reading(2), true), 0u) << "the step begins anew";
}

TEST(Recorder, ForgetsAStepThatDidNotEndAndWhatIsNotToBeRecorded) {
  Recorder recorder;
  const std::vector<Access> step = {reading(0), reading(1)};
  record(recorder, step);
  recorder.begin_step();
  recorder.follow(reading(1), true);
  recorder.begin_step();
  EXPECT_EQ(recorder.follow(reading(0), true), 0u);
  EXPECT_EQ(recorder.follow(reading(1), false), 1u);
  EXPECT_EQ(recorder.end_step(), std::vector<Access>{reading(0)});
}

TEST(Recorder, KnowsWhatIsHeldFromEarlierAccesses) {
  using Held = std::vector<std::vector<Access>>;
  Recorder recorder;
  recorder.begin_step();
  recorder.follow(reading(0), true);
  recorder.follow(reading(1), true, {reading(0)});
  recorder.follow(reading(2), false, {reading(1)});
  recorder.follow(final_gradient(2), true);
  recorder.end_step();
  EXPECT_EQ(recorder.held(), (Held{{}, {reading(0)}}));
  recorder.follow(reading(1), true, {reading(0)});
  recorder.begin_step();
  recorder.follow(reading(0), true);
  recorder.end_step();
  EXPECT_EQ(recorder.held(), Held());
}

// A reference that looks for each access one by one.
TEST(Recorder, FindsTheNextOfItsKindInAnyOrder) {
  std::mt19937 random(3);
  std::vector<Access> expected;
  Recorder recorder;
  for (int step = 0; step < 40; ++step) {
    std::vector<Access> now;
    recorder.begin_step();
    std::size_t next = 0;
    for (std::size_t i = 0; i < 60; ++i) {
      now.push_back(random() % 3 == 0 ? final_gradient(random() % 9) : reading(random() % 9));
      const auto found =
          std::find(expected.begin() + static_cast<std::ptrdiff_t>(next), expected.end(), now.back());
      const auto at = static_cast<std::size_t>(found - expected.begin());
      const std::size_t place = at < expected.size() ? at : next < expected.size() ? next : 0;
      EXPECT_EQ(recorder.follow(now.back(), true), place);
      if (at < expected.size()) next = at + 1;
    }
    recorder.end_step();
    expected = now;
  }
}

}  // namespace recorder_test
}  // namespace sluice::engine
