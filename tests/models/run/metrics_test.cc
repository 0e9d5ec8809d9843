#include "models/run/metrics.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/error.h"
#include "core/json.h"
#include "core/text_file.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::models::metrics_test {

class MetricsTest : public ::testing::Test {
 protected:
  MetricsTest() : path_(::testing::TempDir() + "metrics-" + std::to_string(::getpid()) + ".jsonl") {
    remove();
  }
  ~MetricsTest() override { remove(); }
  void remove() const { std::filesystem::remove(path_); }
  std::vector<std::string> lines() const {
    std::ifstream file(path_);
    std::vector<std::string> found;
    for (std::string line; std::getline(file, line);) found.push_back(line);
    return found;
  }
  void write(std::uint64_t first, std::uint64_t last, const std::string& run = kRun) const {
    MetricsFile metrics(path_, run, first == 1 ? std::nullopt : std::optional(first - 1));
    for (std::uint64_t step = first; step <= last; ++step) metrics.add(report(step));
  }
  static constexpr const char* kRun = "0123456789abcdef";
  void expect_refused(const std::string& run, std::optional<std::uint64_t> step, const char* part) const {
    const std::string before = read_text_file(path_);
    expect_error(ErrorCode::kInvalidArgument, {part}, [&] { MetricsFile(path_, run, step); });
    EXPECT_EQ(read_text_file(path_), before);
  }
  static StepReport report(std::uint64_t step) {
    StepReport r;
    r.step = step;
    r.loss = 1.0 / (3.0 + static_cast<double>(step));
    return r;
  }
  std::string path_;
};

TEST_F(MetricsTest, LossBitsAreRecoverable) {
  write(1, 20);
  const auto found = lines();
  ASSERT_EQ(found.size(), 20u);
  for (std::uint64_t step = 1; step <= 20; ++step) {
    const Json row = Json::parse(found[step - 1]);
    EXPECT_EQ(row.at("step").get<std::uint64_t>(), step);
    EXPECT_EQ(std::bit_cast<std::uint64_t>(row.at("loss").get<double>()),
              std::bit_cast<std::uint64_t>(report(step).loss));
  }
}

TEST_F(MetricsTest, AScaledLossComesWithItsScaleAndASkippedStepWithoutANorm) {
  StepReport scaled = report(1);
  scaled.loss_scale = 4096;
  scaled.skipped = true;
  scaled.gradient_norm = std::numeric_limits<double>::infinity();
  {
    MetricsFile metrics(path_, kRun, std::nullopt);
    metrics.add(scaled);
    metrics.add(report(2));
  }
  const auto found = lines();
  const Json skipped = Json::parse(found.at(0)), plain = Json::parse(found.at(1));
  EXPECT_EQ(skipped.at("loss_scale"), 4096);
  EXPECT_EQ(skipped.at("skipped"), true);
  EXPECT_TRUE(skipped.at("gradient_norm").is_null());
  EXPECT_FALSE(plain.contains("loss_scale") || plain.contains("skipped"));
}

TEST_F(MetricsTest, ResumingTakesAwayLaterLinesAndTheOneThatWasCutOff) {
  write(1, 5);
  std::ofstream(path_, std::ios::app) << R"({"version":5,"run":"0123)";
  write(4, 4);  // resumed after step 3
  const auto found = lines();
  ASSERT_EQ(found.size(), 4u);
  EXPECT_EQ(Json::parse(found[3]).at("step"), 4);
}

TEST_F(MetricsTest, ALastLineWithoutItsEndIsTakenAwayEvenIfItCanBeRead) {
  write(1, 2);
  std::ofstream(path_, std::ios::app) << R"({"version":5,"run":"0123456789abcdef","step":3,"loss":1})";
  write(4, 4);
  const auto found = lines();
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(Json::parse(found[2]).at("step"), 4);
}

TEST_F(MetricsTest, AFileThatIsThereIsNotTouchedByANewRun) {
  write(1, 2);
  expect_refused(kRun, std::nullopt, "there already");
}

TEST_F(MetricsTest, AForeignFileIsRefusedUnchangedAlsoWhenResuming) {
  std::ofstream(path_) << "a diary\nof importance\n";
  expect_refused(kRun, 7, "something else");
}

TEST_F(MetricsTest, LinesOfAnotherRunAreKept) {
  write(1, 5, "another run");
  expect_refused(kRun, 0, "another run");
  expect_refused(kRun, 5, "another run");
}

TEST_F(MetricsTest, LinesOfAnotherRunBehindOwnOnesAreKept) {
  write(1, 3);
  std::ofstream(path_, std::ios::app) << R"({"version":5,"run":"another","step":9,"loss":1})"
                                      << "\n";
  expect_refused(kRun, 1, "another run");
}

TEST_F(MetricsTest, ASettingsFileOfOneLineIsNotTakenForALineThatWasCutOff) {
  std::ofstream(path_) << R"({"steps": 12, "lr": 0.1})";
  expect_refused(kRun, 0, "something else");
}

TEST_F(MetricsTest, ALineThatDoesNotFitIsTakenAwayAgain) {
  write(1, 2);
  const std::string before = read_text_file(path_);
  struct rlimit limit = {}, old = {};
  ::getrlimit(RLIMIT_FSIZE, &old);
  limit = {before.size() + 30, old.rlim_max};
  const auto previous = ::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &limit);
  MetricsFile metrics(path_, kRun, 2);
  EXPECT_THROW(metrics.add(report(3)), Error);
  ::setrlimit(RLIMIT_FSIZE, &old);
  ::signal(SIGXFSZ, previous);
  EXPECT_EQ(read_text_file(path_), before);
}

TEST_F(MetricsTest, APipeThatNobodyReadsIsAnErrorAndHangsNobody) {
  ASSERT_EQ(::mkfifo(path_.c_str(), 0600), 0);
  expect_error(ErrorCode::kIo, {path_}, [&] { MetricsFile(path_, kRun, std::nullopt); });
}

TEST_F(MetricsTest, OfRanksThatTakeNoPartAreCut) {
  write(1, 6);
  const std::string all = read_text_file(path_), other = "fedcba9876543210";
  const std::string stem = path_.substr(0, path_.size() - 6);
  const auto of = [&](const std::string& rank) { return stem + ".rank" + rank + ".jsonl"; };
  for (const char* name : {"1", "2", "3", "3x", "03", ""}) std::ofstream(of(name)) << all;
  MetricsFile(of("4"), other, std::nullopt).add(report(5));
  const std::string of_other = read_text_file(of("4"));
  cut_metrics_of_absent_ranks(path_, 2, kRun, 4);
  const std::string until_4 = [&] {
    std::string text;
    for (std::size_t i = 0; i < 4; ++i) text += lines()[i] + "\n";
    return text;
  }();
  for (const char* name : {"2", "3"}) EXPECT_EQ(read_text_file(of(name)), until_4) << name;
  for (const char* name : {"1", "3x", "03", ""}) EXPECT_EQ(read_text_file(of(name)), all) << name;
  EXPECT_EQ(read_text_file(of("4")), of_other);
  EXPECT_EQ(read_text_file(path_), all);
  for (const char* name : {"1", "2", "3", "3x", "03", "", "4"}) std::filesystem::remove(of(name));
}

TEST_F(MetricsTest, AFolderThatIsMissingIsNamed) {
  EXPECT_NE(thrown_by([&] {
              MetricsFile(path_ + "/nowhere/m.jsonl", kRun, std::nullopt);
            }).text.find("nowhere/m.jsonl"),
            std::string::npos);
}

}  // namespace sluice::models::metrics_test
