#include "core/trace.h"

#include "core/json.h"
#include "testing.h"
#include "tests/core/support.h"

namespace sluice::trace_test {

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
  EXPECT_EQ(lanes.size(), Trace::kLanes - 2);  // there are no other ranks
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
  EXPECT_EQ(events[0]["cat"], "read");
}

// Pairs of an event's name and its row's name, as in the file.
using Rows = std::vector<std::pair<std::string, std::string>>;
Rows rows_of(const Json& file) {
  std::map<int, std::string> names;
  for (const Json& event : file["traceEvents"])
    if (event["ph"] == "M") names[event["tid"]] = event["args"]["name"];
  Rows rows;
  for (const Json& event : complete_events(file)) rows.emplace_back(event["name"], names.at(event["tid"]));
  return rows;
}

TEST(Trace, GivesOverlappingEventsRowsOfTheirOwn) {
  Trace trace;
  const auto start = Trace::Clock::now();
  const auto add = [&](Trace::Lane lane, const char* name, int begin, int end) {
    trace.add(lane, name, start + std::chrono::nanoseconds(begin), start + std::chrono::nanoseconds(end));
  };
  add(Trace::Lane::kRead, "a", 0, 10);
  add(Trace::Lane::kRead, "b", 5, 20);
  add(Trace::Lane::kWrite, "w", 5, 20);
  add(Trace::Lane::kRead, "c", 10, 30);  // begins when a ends
  add(Trace::Lane::kRead, "e", 0, 41);   // lasts longer than all of them
  add(Trace::Lane::kRead, "d", 30, 40);  // is added late
  add(Trace::Lane::kRead, "f", 41, 41);
  add(Trace::Lane::kCompute, "x", 0, 100);
  const Rows expected = {{"a", "read"},   {"b", "read 3"}, {"w", "write"}, {"c", "read"},
                         {"e", "read 2"}, {"d", "read"},   {"f", "read"},  {"x", "compute"}};
  EXPECT_EQ(rows_of(saved(trace)), expected);
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

TEST(Trace, FailsWhereTheFileCannotBeWritten) {
  const TemporaryFolder folder;
  EXPECT_NE(thrown_by([&] { Trace().save(folder.path("none/trace.json")); }).text.find("none/trace.json"),
            std::string::npos);
}

}  // namespace sluice::trace_test
