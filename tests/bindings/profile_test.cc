#include <regex>

#include "bindings/cli/profile_page.h"
#include "bindings/sluice_process.h"
#include "core/json.h"
#include "testing.h"

namespace sluice::cli::profile_test {

class ProfileTest : public ::testing::Test {
 protected:
  ProfileTest() {
    std::ofstream text(text_);
    for (int i = 0; i < 1000; ++i) text << "the river runs to the sea " << i * 7919 % 1000 << ". ";
  }
  Outcome train(const std::vector<std::string>& more, const char* steps = "6") const {
    std::vector<std::string> words = {"train",  "--model",   "tiny", "--data",    text_,   "--memory",
                                      "600MiB", "--seq",     "32",   "--batch",   "2",     "--steps",
                                      steps,    "--threads", "2",    "--profile", profile_};
    words.insert(words.end(), more.begin(), more.end());
    return run_sluice(words);
  }
  Json data() const { return profile_of(profile_); }

  TemporaryFolder folder_;
  std::string text_ = folder_ / "text.txt", profile_ = folder_ / "p.html";
};

TEST_F(ProfileTest, TheReportIsOneFileThatLoadsNothing) {
  const Outcome outcome = train({});
  ASSERT_EQ(outcome.status, 0) << outcome.error;
  const std::string page = file_text(profile_);
  EXPECT_LT(page.size(), 3u << 20);
  EXPECT_THAT(page, HasSubstr("Chart.js v"));
  EXPECT_THAT(page, HasSubstr("Permission is hereby granted"));
  for (const char* mark : {"@DATA@", "@LICENCE@", "@LIBRARY@"}) EXPECT_THAT(page, Not(HasSubstr(mark)));
  const std::regex loads(
      R"re((src|href|action)\s*=\s*["']?\s*(https?:)?//|@import|url\(|<link|<iframe|fetch\(|XMLHttpRequest|importScripts|new WebSocket)re");
  std::smatch found;
  const std::string own =
      page.substr(0, page.find("/*!")) + page.substr(page.find("'use strict';\nconst data"));
  EXPECT_FALSE(std::regex_search(own, found, loads)) << found.str();
}

TEST_F(ProfileTest, TheDataAgreesWithTheMetricsThePlanAndTheLedger) {
  const std::string metrics = folder_ / "m.jsonl";
  const Outcome outcome = train({"--metrics", metrics, "--disk", folder_.path() + ":256MiB", "--place-state",
                                 "disk", "--place-parameters", "disk", "--out", folder_ / "out"});
  ASSERT_EQ(outcome.status, 0) << outcome.error;
  const Json json = data();
  ASSERT_EQ(json.at("version"), 1);
  const Json& steps = json.at("steps");
  std::ifstream file(metrics);
  std::size_t i = 0;
  double waits = 0;
  for (std::string line; std::getline(file, line); ++i) {
    const Json row = Json::parse(line);
    EXPECT_EQ(steps.at("first").at(i), row.at("step"));
    for (const auto& [mine, its] : std::map<std::string, std::string>{{"loss", "loss"},
                                                                      {"seconds", "seconds"},
                                                                      {"read_wait", "read_wait_seconds"},
                                                                      {"write_wait", "write_wait_seconds"},
                                                                      {"optimizer", "optimizer_seconds"},
                                                                      {"disk_read", "disk_read"},
                                                                      {"disk_written", "disk_written"},
                                                                      {"resident", "memory"},
                                                                      {"peak", "peak_memory"}})
      EXPECT_EQ(steps.at(mine).at(i).get<double>(), row.at(its).get<double>()) << mine;
    waits += row.at("read_wait_seconds").get<double>() + row.at("write_wait_seconds").get<double>();
  }
  EXPECT_EQ(i, 6u);
  EXPECT_GT(waits, 0);

  // Everything that was planned was charged, and nothing exceeded the budget.
  const Json& peaks = json.at("peaks");
  EXPECT_EQ(peaks.at("disk").at("total"), json.at("plan").at("disk"));
  const auto charged = peaks.at("host").at("total").get<std::uint64_t>();
  const auto planned = json.at("plan").at("predicted_peak").get<std::uint64_t>();
  EXPECT_GE(charged, planned);
  EXPECT_LT(charged - planned, 64u << 10);  // the plan does not count the checksums of blocks on disk
  EXPECT_LE(peaks.at("host").at("total"), json.at("budget").at("host"));
  EXPECT_EQ(json.at("budget").at("host"), 600u << 20);
  for (const char* tier : {"host", "disk"}) {
    const Json& columns = json.at("memory").at(tier);
    std::uint64_t most = 0;
    for (std::size_t at = 0; at < columns.at("time").size(); ++at) {
      std::uint64_t all = 0;
      for (const auto& [name, column] : columns.items())
        if (name != "time") all += column.at(at).get<std::uint64_t>();
      most = std::max(most, all);
    }
    EXPECT_EQ(most, peaks.at(tier).at("total")) << tier;
  }

  // The lanes moved as many bytes as were counted, including the first values and the checkpoint.
  const Json& events = json.at("events");
  EXPECT_EQ(events.at("dropped"), 0);
  const auto total = [](const Json& column) {
    const auto numbers = column.get<std::vector<double>>();
    return std::accumulate(numbers.begin(), numbers.end(), 0.0);
  };
  EXPECT_GE(json.at("lanes").at("read").at("bytes").get<double>(), total(steps.at("disk_read")));
  EXPECT_GE(json.at("lanes").at("write").at("bytes").get<double>(), total(steps.at("disk_written")));
  EXPECT_EQ(json.at("lanes").at("save").at("events"), 1);
  for (const char* column : {"name", "begin", "seconds", "bytes"})
    EXPECT_EQ(events.at(column).size(), events.at("lane").size());
  EXPECT_EQ(json.at("windows").at("step"), Json({1, 2, 3, 4, 5, 6}));
}

TEST_F(ProfileTest, TheReportNamesAStepThatFailed) {
  const Outcome outcome = train({"--lr", "1e5", "--clip", "0", "--schedule", "constant"}, "60");
  ASSERT_NE(outcome.status, 0) << outcome.out;
  EXPECT_THAT(data().at("run").at("error").get<std::string>(), HasSubstr("not finite"));
}

TEST_F(ProfileTest, OnlyAReportIsReplaced) {
  std::ofstream(profile_) << "<!DOCTYPE html><p>mine</p>";
  const Outcome refused = train({});
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.error, HasSubstr("is not a profile; name another file for --profile"));
  EXPECT_EQ(file_text(profile_), "<!DOCTYPE html><p>mine</p>");
  std::filesystem::remove(profile_);
  EXPECT_EQ(train({}).status, 0);
  const Outcome same = train({"--trace", profile_});
  EXPECT_EQ(same.status, 2);
  EXPECT_THAT(same.error, HasSubstr("name one file"));
  EXPECT_EQ(train({}).status, 0);
}

// Files of ranks that take no part would be taken for a part of this run.
TEST_F(ProfileTest, OfAbsentRanksAreRemoved) {
  const std::filesystem::path own = profile_;
  const std::string stem = (own.parent_path() / own.stem()).string();
  ASSERT_EQ(train({}).status, 0);
  for (const char* rank : {"1", "3"}) std::filesystem::copy_file(own, stem + ".rank" + rank + ".html");
  std::ofstream(stem + ".rank2.html") << "<!DOCTYPE html><p>mine</p>";
  ASSERT_EQ(train({}).status, 0);
  for (const char* rank : {"1", "3"})
    EXPECT_FALSE(std::filesystem::exists(stem + ".rank" + rank + ".html")) << rank;
  EXPECT_EQ(file_text(stem + ".rank2.html"), "<!DOCTYPE html><p>mine</p>");
}

TEST_F(ProfileTest, NothingInTheDataEndsItsElement) {
  write_profile(profile_, R"({"a":"</script><b>"})");
  EXPECT_EQ(data().at("a"), "</script><b>");
}

}  // namespace sluice::cli::profile_test
