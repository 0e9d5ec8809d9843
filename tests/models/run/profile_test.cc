#include "models/run/profile.h"
#include "testing.h"

namespace sluice::models::profile_test {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

StepReport report(std::uint64_t step) {
  StepReport r;
  r.step = step;
  r.loss = static_cast<double>(step);
  r.seconds = 0.5;
  r.memory = 5000 - step;
  r.peak_memory = 5000;
  r.disk_read = 8 * step;
  r.read_wait_seconds = 0.125;
  r.optimizer_seconds = 0.25;
  return r;
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

}  // namespace sluice::models::profile_test
