#include "models/metrics.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <filesystem>
#include <fstream>

#include "core/error.h"
#include "core/json.h"
#include "core/text_file.h"

namespace sluice::models {
namespace {

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
  void write(std::uint64_t first, std::uint64_t last) const {
    MetricsFile metrics(path_, first == 1 ? std::nullopt : std::optional(first - 1));
    for (std::uint64_t step = first; step <= last; ++step) metrics.add(report(step));
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

TEST_F(MetricsTest, ResumingTakesAwayLaterLinesAndTheOneThatWasCutOff) {
  write(1, 5);
  std::ofstream(path_, std::ios::app) << R"({"step":6,"lo)";
  write(4, 4);  // resumed after step 3
  const auto found = lines();
  ASSERT_EQ(found.size(), 4u);
  EXPECT_EQ(Json::parse(found[3]).at("step"), 4);
}

TEST_F(MetricsTest, ALastLineWithoutItsEndIsTakenAwayEvenIfItCanBeRead) {
  write(1, 2);
  std::ofstream(path_, std::ios::app) << R"({"step":3,"loss":1})";
  write(4, 4);
  const auto found = lines();
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(Json::parse(found[2]).at("step"), 4);
}

TEST_F(MetricsTest, AFileThatIsThereIsNotTouchedByANewRun) {
  write(1, 2);
  const std::string before = read_text_file(path_);
  EXPECT_THROW(MetricsFile(path_, std::nullopt), Error);
  EXPECT_EQ(read_text_file(path_), before);
}

TEST_F(MetricsTest, AForeignFileIsRefusedUnchangedAlsoWhenResuming) {
  std::ofstream(path_) << "a diary\nof importance\n";
  EXPECT_THROW(MetricsFile(path_, 7), Error);
  EXPECT_EQ(read_text_file(path_), "a diary\nof importance\n");
}

TEST_F(MetricsTest, AFolderThatIsMissingIsNamed) {
  try {
    MetricsFile(path_ + "/nowhere/m.jsonl", std::nullopt);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("nowhere/m.jsonl"), std::string::npos);
  }
}

}  // namespace
}  // namespace sluice::models
