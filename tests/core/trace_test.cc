#include "core/trace.h"

#include <gtest/gtest.h>

#include <map>
#include <thread>

#include "core/json.h"
#include "tests/core/support.h"

namespace sluice {
namespace {

Json saved(const Trace& trace) {
  const TemporaryFolder folder;
  trace.save(folder.path("trace.json"));
  return read_json_file(folder.path("trace.json"));
}

std::vector<Json> complete_events(const Json& file) {
  std::vector<Json> events;
  for (const Json& event : file["traceEvents"])
    if (event["ph"] == "X") events.push_back(event);
  return events;
}

TEST(Trace, WritesTraceEventsWithOneLanePerRow) {
  Trace trace;
  const auto start = Trace::Clock::now();
  trace.add(Trace::Lane::kRead, "block.0 \"quoted\"\n", start, start + std::chrono::microseconds(1500), 4096);
  trace.add(Trace::Lane::kCompute, "forward", start + std::chrono::microseconds(2),
            start + std::chrono::microseconds(5));
  const Json file = saved(trace);
  std::map<int, std::string> lanes;
  for (const Json& event : file["traceEvents"])
    if (event["ph"] == "M" && event["name"] == "thread_name") lanes[event["tid"]] = event["args"]["name"];
  EXPECT_EQ(lanes.size(), 4u);
  const std::vector<Json> events = complete_events(file);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0]["name"], "block.0 \"quoted\"\n");
  EXPECT_EQ(lanes.at(events[0]["tid"]), "read");
  EXPECT_DOUBLE_EQ(events[0]["dur"], 1500);
  EXPECT_EQ(events[0]["args"]["bytes"], 4096);
  EXPECT_EQ(lanes.at(events[1]["tid"]), "compute");
  EXPECT_NEAR(events[1]["ts"].get<double>() - events[0]["ts"].get<double>(), 2, 1e-3);
  EXPECT_GE(events[0]["ts"].get<double>(), 0);
  EXPECT_EQ(events[0]["pid"], events[1]["pid"]);
}

TEST(Trace, KeepsTheLatestAndCountsTheRest) {
  Trace trace(3);
  for (int i = 0; i < 10; ++i)
    trace.add(Trace::Lane::kWrite, std::to_string(i), Trace::Clock::now(), Trace::Clock::now());
  const Json file = saved(trace);
  const std::vector<Json> kept = complete_events(file);
  ASSERT_EQ(kept.size(), 3u);
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(kept[i]["name"], std::to_string(7 + i));
  EXPECT_EQ(file["otherData"]["dropped_events"], 7);
}

TEST(Trace, TakesEventsFromAnyThread) {
  Trace trace;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (int k = 0; k < 250; ++k) const TraceScope scope(&trace, Trace::Lane::kOptimizer, "update");
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(complete_events(saved(trace)).size(), 1000u);
}

TEST(Trace, ScopesMeasureTheirLifetime) {
  Trace trace;
  {
    const TraceScope scope(&trace, Trace::Lane::kCompute, "sleep");
    const TraceScope nothing(nullptr, Trace::Lane::kCompute, "none");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const std::vector<Json> events = complete_events(saved(trace));
  ASSERT_EQ(events.size(), 1u);
  EXPECT_GE(events[0]["dur"].get<double>(), 5000);
}

TEST(Trace, ThatCannotBeWrittenIsAnError) {
  const TemporaryFolder folder;
  EXPECT_NE(thrown_by([&] { Trace().save(folder.path("none/trace.json")); }).text.find("none/trace.json"),
            std::string::npos);
}

}  // namespace
}  // namespace sluice
