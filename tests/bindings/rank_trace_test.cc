#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "bindings/run_outputs.h"
#include "bindings/sluice_process.h"
#include "core/json.h"

// The trace of several ranks, as users get it.
namespace sluice::cli {
namespace rank_trace_test {

using ::testing::HasSubstr;

class RankTraceTest : public ::testing::Test {
 protected:
  RankTraceTest() { std::ofstream(text_) << lesson(); }
  std::vector<std::string> words(const std::string& name, int ranks, int steps,
                                 const std::vector<std::string>& more) const {
    std::vector<std::string> all =
        tiny_training(text_, folder_ / name, steps,
                      {{"--tokens", "bytes", "--accumulate", "12", "--threads", "1", "--ranks",
                        std::to_string(ranks), "--trace", folder_ / "trace.json"}});
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  static void expect_done(const Outcome& outcome) {
    ASSERT_EQ(outcome.status, 0) << outcome.error << outcome.out;
  }
  TemporaryFolder folder_;
  const std::string text_ = folder_ / "lesson.txt";
};

// What a trace of ranks has of a rank, with times in nanoseconds.
struct Traced {
  double uncertainty = 0;
  std::map<std::string, std::vector<double>> ends;  // of its events, by name, in order
  std::map<std::string, std::vector<double>> begins;
};

std::vector<Traced> traced_ranks(const std::string& path) {
  const Json file = Json::parse(file_text(path));
  EXPECT_EQ(file.at("otherData").at("dropped_events"), 0);
  EXPECT_EQ(file.at("otherData").at("clock"), "CLOCK_MONOTONIC of rank 0");
  std::vector<Traced> ranks;
  for (const Json& about : file.at("otherData").at("ranks")) {
    const double uncertainty = about.at("uncertainty_us");
    // Ranks of a host have one clock.
    for (const Json& ahead : about.at("clock_ahead_us"))
      EXPECT_LE(std::abs(ahead.get<double>()), uncertainty);
    ranks.push_back({uncertainty * 1e3, {}, {}});
  }
  std::size_t names = 0;
  for (const Json& event : file.at("traceEvents")) {
    names += event.at("name") == "process_name" ? 1 : 0;
    Traced& rank = ranks.at(event.at("pid").get<std::size_t>() - 1);
    if (event.at("ph") != "X") continue;
    const double begin = event.at("ts").get<double>() * 1e3, length = event.at("dur").get<double>() * 1e3;
    rank.begins[event.at("name")].push_back(begin);
    rank.ends[event.at("name")].push_back(begin + length);
  }
  EXPECT_EQ(names, ranks.size());
  return ranks;
}

// A gradient is there when every rank has computed what it adds, and not before. So are the rows of the
// embedding's, which ranks exchange first: they wait for each other there, and often nowhere else.
TEST_F(RankTraceTest, HasNoSumBeforeItsParts) {
  constexpr int kSteps = 6;
  expect_done(run_sluice(words("traced", 3, kSteps, {"--group", "4"})));
  const std::vector<Traced> ranks = traced_ranks(folder_ / "trace.json");
  ASSERT_EQ(ranks.size(), 3u);
  const std::string of_gradient = "the gradient of ", backward = "backward ";
  std::size_t compared = 0;
  for (const Traced& waiting : ranks)
    for (const auto& [name, ends] : waiting.ends) {
      const std::size_t found = name.find(of_gradient);
      if (found == std::string::npos) continue;
      const std::string pass = backward + name.substr(found + of_gradient.size());
      if (!waiting.ends.contains(pass)) continue;  // the head's
      for (std::size_t i = 0; i < ends.size(); ++i) {
        // Short waits are left out, so that the step is found by the rank's own passes.
        const auto step = static_cast<std::size_t>(std::ranges::count_if(
            waiting.ends.at(pass), [&](double end) { return end <= waiting.begins.at(name)[i]; }));
        ASSERT_GE(step, 1u);
        for (const Traced& other : ranks) {
          ASSERT_EQ(other.ends.at(pass).size(), static_cast<std::size_t>(kSteps));
          EXPECT_LE(other.ends.at(pass)[step - 1], ends[i] + waiting.uncertainty + other.uncertainty) << name;
          ++compared;
        }
      }
    }
  EXPECT_GT(compared, 0u);
  const Outcome shown = run_sluice({"inspect", folder_ / "trace.json"});
  expect_done(shown);
  for (const char* rank : {"rank 0 on ", "rank 1 on ", "rank 2 on "}) EXPECT_THAT(shown.out, HasSubstr(rank));
  std::filesystem::remove(folder_ / "trace.json");
  expect_done(run_sluice(words("alone", 1, 2, {})));
  EXPECT_FALSE(Json::parse(file_text(folder_ / "trace.json")).at("otherData").contains("ranks"));
}

}  // namespace rank_trace_test
}  // namespace sluice::cli
