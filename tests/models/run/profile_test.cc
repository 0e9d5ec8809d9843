#include "models/run/profile.h"

#include <gtest/gtest.h>

#include <cmath>

namespace sluice::models {
namespace profile_test {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

StepReport report(std::uint64_t step) {
  StepReport r;
  r.step = step;
  r.loss = static_cast<double>(step);
  r.seconds = 0.5;
  r.read_wait_seconds = 0.125;
  r.optimizer_seconds = 0.25;
  r.disk_read = 8 * step;
  r.memory = 5000 - step;
  r.peak_memory = 5000;
  return r;
}

TEST(RunProfileTest, StepsAreKeptOneByOneWhileThereAreFew) {
  const auto origin = Clock::now();
  StepSeries series(4);
  for (std::uint64_t step = 1; step <= 4; ++step)
    series.add(report(step), origin + milliseconds(1000 * step), origin + milliseconds(1000 * step + 500));
  const Json rows = series.rows(origin);
  EXPECT_EQ(rows.at("first"), Json({1, 2, 3, 4}));
  EXPECT_EQ(rows.at("last"), rows.at("first"));
  EXPECT_EQ(rows.at("loss"), Json({1.0, 2.0, 3.0, 4.0}));
  EXPECT_EQ(rows.at("begin"), Json({1.0, 2.0, 3.0, 4.0}));
  EXPECT_EQ(rows.at("end").at(0), 1.5);
  EXPECT_EQ(rows.at("read_wait").at(2), 0.125);
  EXPECT_EQ(rows.at("loss_scale"), Json({nullptr, nullptr, nullptr, nullptr}));
  EXPECT_EQ(rows.at("skipped"), Json({0, 0, 0, 0}));
  EXPECT_EQ(series.windows(origin).at("step"), Json({1, 2, 3, 4}));
}

TEST(RunProfileTest, SkippedStepsAreCountedAndTheLastLossScaleStands) {
  const auto origin = Clock::now();
  StepSeries series(2);
  for (std::uint64_t step = 1; step <= 4; ++step) {
    StepReport scaled = report(step);
    scaled.loss_scale = 1024.0 / static_cast<double>(step);
    scaled.skipped = step != 3;
    series.add(scaled, origin + milliseconds(step), origin + milliseconds(step + 1));
  }
  const Json rows = series.rows(origin);
  EXPECT_EQ(rows.at("skipped"), Json({2, 1}));
  EXPECT_EQ(rows.at("loss_scale"), Json({512.0, 256.0}));
}

TEST(RunProfileTest, MeansOfManyStepsKeepTheirSumAndEveryStep) {
  const auto origin = Clock::now();
  for (const std::uint64_t steps : {5u, 6u, 7u, 100u, 1001u}) {
    StepSeries series(4);
    for (std::uint64_t step = 1; step <= steps; ++step)
      series.add(report(step), origin + milliseconds(step), origin + milliseconds(step + 1));
    const Json rows = series.rows(origin);
    ASSERT_LE(rows.at("first").size(), 4u);
    double sum = 0;
    std::uint64_t next = 1;
    for (std::size_t i = 0; i < rows.at("first").size(); ++i) {
      EXPECT_EQ(rows.at("first").at(i), next) << steps;
      const std::uint64_t last = rows.at("last").at(i);
      const auto count = static_cast<double>(last - next + 1);
      sum += rows.at("loss").at(i).get<double>() * count;
      EXPECT_DOUBLE_EQ(rows.at("seconds").at(i), 0.5);
      EXPECT_EQ(rows.at("resident").at(i), 5000 - next);  // the greatest
      next = last + 1;
    }
    EXPECT_EQ(next, steps + 1);
    EXPECT_NEAR(sum, static_cast<double>(steps * (steps + 1)) / 2, 1e-6 * sum);
    EXPECT_EQ(series.windows(origin).at("step").size(), std::min<std::uint64_t>(steps, 64));
    EXPECT_EQ(series.windows(origin).at("step").back(), steps);
  }
}

TEST(RunProfileTest, EventsAreCountedByLaneAndBusyTimeIsNotCountedTwice) {
  Trace trace(100);
  const auto origin = Clock::now();
  const auto at = [&](int ms) { return origin + milliseconds(ms); };
  trace.add(Trace::Lane::kRead, "a", at(0), at(10), 5);
  trace.add(Trace::Lane::kRead, "b", at(5), at(20), 6);
  trace.add(Trace::Lane::kRead, "\"quoted\" <b>", at(30), at(40), 7);
  trace.add(Trace::Lane::kReadWait, "a", at(12), at(13));
  const EventColumns columns = event_columns(trace, origin);
  const Json events = Json::parse(columns.events);
  EXPECT_EQ(columns.lanes.at("read").at("events"), 3);
  EXPECT_EQ(columns.lanes.at("read").at("bytes"), 18);
  EXPECT_DOUBLE_EQ(columns.lanes.at("read").at("busy"), 0.030);
  EXPECT_EQ(columns.lanes.at("write").at("events"), 0);
  EXPECT_EQ(events.at("names"), Json({"a", "b", "\"quoted\" <b>"}));
  EXPECT_EQ(events.at("name"), Json({0, 1, 2, 0}));
  EXPECT_EQ(events.at("lanes").at(events.at("lane").at(3).get<std::size_t>()), "read wait");
  EXPECT_EQ(events.at("begin").at(1), 0.005);
  EXPECT_EQ(events.at("seconds").at(1), 0.015);
  EXPECT_EQ(events.at("dropped"), 0);
}

TEST(RunProfileTest, OfManyEventsTheLatestAreKept) {
  Trace trace(kProfileEvents + 10);
  const auto origin = Clock::now();
  for (std::size_t i = 0; i < kProfileEvents + 15; ++i)
    trace.add(Trace::Lane::kCompute, "c", origin + milliseconds(i), origin + milliseconds(i + 1));
  const Json events = Json::parse(event_columns(trace, origin).events);
  EXPECT_EQ(events.at("dropped"), 15);
  EXPECT_EQ(events.at("begin").size(), kProfileEvents);
  EXPECT_EQ(events.at("begin").at(0), 0.015);
}

}  // namespace profile_test
}  // namespace sluice::models
