#include "models/run/rank_traces.h"

#include "comm/worlds.h"
#include "core/json.h"
#include "core/text_file.h"
#include "temporary_folder.h"
#include "testing.h"

// Traces of several ranks in one file. Each rank is a thread here, with a clock of its own.
namespace sluice::models::rank_traces_test {

using std::chrono::nanoseconds;

constexpr std::int64_t kSecond = 1'000'000'000;

// Returns the time that a rank's clock shows at a time of rank 0's, which began at `origin`: hours ahead, and
// too fast by a thousandth for each rank.
std::int64_t skewed(int rank, std::int64_t origin, std::int64_t time) {
  return time + rank * (5000 * kSecond + (time - origin) / 1000);
}

struct Found {
  std::map<int, std::string> processes;
  std::map<int, std::vector<Json>> events;  // by process
  Json about;
};

class RankTracesTest : public ::testing::Test {
 protected:
  // Each rank traces that something happened at the same times for all, and what `more` adds.
  Found traces(int ranks, const std::vector<std::int64_t>& times,
               const std::function<void(Trace&, int rank)>& more = {}) const {
    const std::int64_t origin = engine::steady_nanoseconds();
    comm::run_communicators(comm::World::kThreads, ranks, [&](comm::Communicator& communicator) {
      const int rank = communicator.rank();
      RankTraces all(&communicator, path(), rank == 0 ? "" : "the second",
                     [&, rank] { return skewed(rank, origin, engine::steady_nanoseconds()); });
      Trace trace(1000);
      // Once all clocks have been read.
      const std::int64_t start =
          std::stoll(communicator.exchange(1, "now", std::to_string(engine::steady_nanoseconds()))[0]);
      for (const std::int64_t time : times) {
        while (engine::steady_nanoseconds() < start + time) std::this_thread::yield();
        const Trace::Clock::time_point begin{nanoseconds(skewed(rank, origin, start + time))};
        trace.add(Trace::Lane::kCompute, "together", begin, begin + nanoseconds(1000), 7);
      }
      if (more) more(trace, rank);
      all.save(&trace);
    });
    return found();
  }
  Found found() const { return found_in(path()); }
  static Found found_in(const std::string& path) {
    const Json file = read_json_file(path);
    Found found;
    found.about = file.at("otherData");
    for (const Json& event : file.at("traceEvents")) {
      const int process = event.at("pid");
      if (event.at("name") == "process_name") found.processes[process] = event.at("args").at("name");
      if (event.at("ph") == "X") found.events[process].push_back(event);
    }
    return found;
  }
  std::string path() const { return folder_ / "trace.json"; }
  TemporaryFolder folder_;
};

TEST_F(RankTracesTest, AreProcessesOfOneFileWithOneClock) {
  const std::vector<std::int64_t> times = {0, kSecond / 20, kSecond / 10};
  const Found found = traces(3, times);
  ASSERT_EQ(found.processes.size(), 3u);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(found.processes.at(rank + 1).find("rank " + std::to_string(rank) + " on "), 0u);
    EXPECT_EQ(found.processes.at(rank + 1).ends_with(", the second"), rank > 0);
    const Json& about = found.about.at("ranks").at(static_cast<std::size_t>(rank));
    const double uncertainty = about.at("uncertainty_us");
    EXPECT_NEAR(about.at("clock_ahead_us").at(0).get<double>(), rank * 5e9, rank * 1e6);
    ASSERT_EQ(found.events.at(rank + 1).size(), times.size());
    for (std::size_t i = 0; i < times.size(); ++i) {
      const Json &own = found.events.at(rank + 1)[i], &first = found.events.at(1)[i];
      EXPECT_NEAR(own.at("ts").get<double>(), first.at("ts").get<double>(), uncertainty + 0.01);
      EXPECT_EQ(own.at("args").at("bytes"), 7);
      EXPECT_GE(own.at("ts").get<double>(), 0);
    }
  }
}

// A rank's text takes many parts, and ranks have dropped events.
TEST_F(RankTracesTest, HaveAllEventsOfEachRank) {
  const Found found = traces(4, {0}, [](Trace& trace, int rank) {
    const auto now = Trace::Clock::now();
    for (int i = 0; i < 900 + 100 * rank; ++i)
      trace.add(Trace::Lane::kRead, std::to_string(i) + std::string(200, 'x'), now, now);
  });
  for (int rank = 0; rank < 4; ++rank) {
    const std::vector<Json>& events = found.events.at(rank + 1);
    const std::size_t dropped = rank == 0 ? 0 : static_cast<std::size_t>(100 * rank - 99);
    EXPECT_EQ(found.about.at("ranks").at(static_cast<std::size_t>(rank)).at("dropped_events"), dropped);
    ASSERT_EQ(events.size(), 901u + 100u * static_cast<unsigned>(rank) - dropped);
    for (std::size_t i = dropped == 0 ? 1 : 0; i < events.size(); ++i)
      EXPECT_TRUE(events[i].at("name").get<std::string>().starts_with(std::to_string(i + dropped - 1) + "x"));
  }
  EXPECT_EQ(found.about.at("dropped_events"), 1 + 101 + 201);
}

TEST_F(RankTracesTest, OfOneRankAreItsOwn) {
  Trace trace;
  RankTraces alone(nullptr, path());
  trace.add(Trace::Lane::kWrite, "x", Trace::Clock::now(), Trace::Clock::now());
  alone.save(&trace);
  const Found file = found();
  EXPECT_TRUE(file.processes.empty());
  EXPECT_EQ(file.events.at(1).size(), 1u);
}

// The others wait for rank 0, and learn why it does not write.
TEST_F(RankTracesTest, ThatCannotBeWrittenFailOnAllRanks) {
  std::filesystem::create_directory(path());
  std::vector<std::string> errors(3);
  comm::run_communicators(comm::World::kThreads, 3, [&](comm::Communicator& communicator) {
    try {
      RankTraces all(&communicator, path());
      const Trace trace(1000);
      all.save(&trace);
    } catch (const Error& error) {
      errors[static_cast<std::size_t>(communicator.rank())] = error.what();
      communicator.fail(error.what());
    }
  });
  for (const std::string& error : errors) EXPECT_NE(error.find("trace.json"), std::string::npos) << error;
}

// After a failure each rank writes a file of its own, and the events of all have one clock.
TEST_F(RankTracesTest, OfRanksThatFailAreFilesOfTheirOwn) {
  const std::int64_t origin = engine::steady_nanoseconds();
  std::ofstream(folder_ / "trace.rank2.json") << "somebody's";
  std::ofstream(folder_ / "trace.rank3.json")
      << kTraceBeginning << ":0},\"traceEvents\":[]}";  // of an earlier run
  std::vector<std::string> errors(4);
  comm::run_communicators(comm::World::kThreads, 4, [&](comm::Communicator& communicator) {
    const int rank = communicator.rank();
    RankTraces all(&communicator, path(), "",
                   [&, rank] { return skewed(rank, origin, engine::steady_nanoseconds()); });
    Trace trace(1000);
    const std::int64_t start =
        std::stoll(communicator.exchange(1, "now", std::to_string(engine::steady_nanoseconds()))[0]);
    const Trace::Clock::time_point begin{nanoseconds(skewed(rank, origin, start))};
    trace.add(Trace::Lane::kCompute, "together", begin, begin + nanoseconds(1000), 7);
    communicator.barrier(2, "before the failure");
    if (rank == 3) return;  // it is killed
    try {
      all.save_alone(&trace);
    } catch (const Error& error) {
      errors[static_cast<std::size_t>(rank)] = error.what();
    }
  });
  const Found first = found(), second = found_in(folder_ / "trace.rank1.json");
  EXPECT_EQ(second.processes.at(2).find("rank 1 on "), 0u);
  const Json& about = second.about.at("ranks").at(0);
  EXPECT_EQ(about.at("rank"), 1);
  EXPECT_GE(first.events.at(1).at(0).at("ts").get<double>(), 0);
  // Rank 1's clock, which is too fast by a thousandth, was read a moment before.
  EXPECT_NEAR(second.events.at(2).at(0).at("ts").get<double>(),
              first.events.at(1).at(0).at("ts").get<double>(),
              about.at("uncertainty_us").get<double>() + 1000);
  EXPECT_NE(errors[2].find("is not a trace"), std::string::npos) << errors[2];
  EXPECT_EQ(read_text_file(folder_ / "trace.rank2.json"), "somebody's");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "trace.rank3.json"));
}

// A run of fewer ranks leaves no file that would be taken for one of its own, and no file that is no trace is
// touched.
TEST_F(RankTracesTest, OfRanksThatTakeNoPartAreRemoved) {
  const auto file = [&](const std::string& name) { return folder_ / name; };
  for (const int ranks : {1, 2}) {
    for (const char* name : {"trace.rank1.json", "trace.rank2.json", "trace.rank3.json", "trace.rank03.json",
                             "trace.rank4.txt", "other.rank3.json"})
      std::ofstream(file(name)) << kTraceBeginning << ":0},\"traceEvents\":[]}";
    std::ofstream(file("trace.rank5.json")) << "somebody's";
    comm::run_communicators(comm::World::kThreads, ranks,
                            [&](comm::Communicator& communicator) { RankTraces(&communicator, path()); });
    for (const char* name : {"trace.rank1.json", "trace.rank2.json", "trace.rank3.json"})
      EXPECT_FALSE(std::filesystem::exists(file(name))) << name << ", " << ranks;
    for (const char* name : {"trace.rank03.json", "trace.rank4.txt", "other.rank3.json", "trace.rank5.json"})
      EXPECT_TRUE(std::filesystem::exists(file(name))) << name << ", " << ranks;
  }
}

}  // namespace sluice::models::rank_traces_test
