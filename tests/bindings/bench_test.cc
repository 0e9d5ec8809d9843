#include <fmt/format.h>
#include <signal.h>

#include "bindings/cli/bench_report.h"
#include "bindings/sluice_process.h"
#include "core/error.h"
#include "core/json.h"
#include "testing.h"

namespace sluice::cli::bench_test {

class BenchTest : public ::testing::Test {
 protected:
  static Json measured(std::vector<std::string> words) {
    words.insert(words.begin(), "bench");
    words.insert(words.end(), {"--seconds", "0.02", "--json"});
    const Outcome outcome = run_sluice(words);
    EXPECT_EQ(outcome.status, 0) << outcome.error;
    return outcome.status == 0 ? Json::parse(outcome.out) : Json();
  }
  static void expect_report(const Json& report, const std::string& bench, std::size_t rows) {
    ASSERT_TRUE(report.is_object());
    EXPECT_EQ(report.at("version"), 1);
    EXPECT_EQ(report.at("bench"), bench);
    ASSERT_EQ(report.at("rows").size(), rows) << report.dump(2);
    for (const Json& row : report.at("rows")) {
      const double reached = row.at("reached"), limit = row.at("limit"), ratio = row.at("ratio");
      EXPECT_GT(reached, 0);
      EXPECT_GT(limit, 0);
      EXPECT_DOUBLE_EQ(ratio, row.at("unit") == "seconds" ? limit / reached : reached / limit);
      EXPECT_FALSE(row.at("limit_is").get<std::string>().empty());
    }
  }
  static void expect_refused(std::vector<std::string> words, int status, const std::string& part) {
    words.insert(words.begin(), "bench");
    expect_refusal(words, status, {part});
  }
  TemporaryFolder folder_;
};

TEST_F(BenchTest, TheDiskIsComparedWithIoUringAloneAndNothingIsLeftThere) {
  const Json report = measured({"disk", folder_.path(), "--size", "16MiB", "--depth", "4"});
  const bool fio = report.at("settings").contains("fio");  // without fio a note says so
  expect_report(report, "disk", fio ? 6 : 4);
  EXPECT_EQ(report.at("notes").size(), fio ? 1 : 2);
  EXPECT_EQ(report.at("settings").at("depth"), 4);
  EXPECT_EQ(report.at("settings").at("bytes"), 16u << 20);
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

TEST_F(BenchTest, CopiesAreComparedWithTheSameStreams) {
  const Json report = measured({"copy", "--size", "1MiB", "--threads", "2"});
  expect_report(report, "copy", 7);
  EXPECT_EQ(report.at("machine").at("threads"), 2);
}

TEST_F(BenchTest, CopiesToAGpuAreComparedWithOneCopy) {
  const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path() / ".." / "lib";
  if (!std::filesystem::exists(folder / "libsluice_cuda.so"))
    GTEST_SKIP() << "Sluice was built without CUDA's header cuda.h";
  {
    const Variable driver("SLUICE_CUDA_DRIVER", folder / "libsluice_fake_cuda.so");
    const Json report = measured({"link", "--size", "32MiB"});
    expect_report(report, "link", 9);
    EXPECT_EQ(report.at("settings").at("gpu"), "fake GPU");
    EXPECT_EQ(report.at("settings").at("bytes"), 32u << 20);
    expect_report(measured({"link", "--size", "32MiB", "--device", "0"}), "link", 9);
    expect_refused({"link", "--device", "3"}, 2, "--device 3: GPU 3 was asked for");
    expect_refused({"link", "--device", "4294967296"}, 2,
                   "--device: 4294967296 was given; a number from 0 to 4095 is needed");
    expect_refused(
        {"link", "--size", "512MiB"}, 3,
        "1.03 GiB of memory of GPU 0 (fake GPU), of which 1.00 GiB are free: give a smaller --size");
  }
  const Variable none("SLUICE_CUDA_DRIVER", "/nowhere/libcuda.so.1");
  expect_refused({"link"}, 2, "--device 0: a GPU was asked for, but its driver cannot be loaded");
}

TEST_F(BenchTest, EveryCombinationOfAnOptimizerIsMeasured) {
  const Json report =
      measured({"optimizer", "--elements", "70000", "--optimizer", "lion", "--dtype", "bf16"});
  expect_report(report, "optimizer", 6);
  EXPECT_EQ(report.at("settings").at("elements"), 131072);  // rounded up to a whole number of stream blocks
  // The master and a momentum are read and written, the gradient is read, and the parameter is written.
  EXPECT_EQ(report.at("rows").at(0).at("bytes_per_element"), 4 * 4 + 2 + 2);
  for (const Json& row : report.at("rows")) {
    const double memory = row.at("limit_memory"), arithmetic = row.at("limit_arithmetic");
    EXPECT_EQ(row.at("limit"), std::min(memory, arithmetic));
  }
  const Json one = measured(
      {"optimizer", "--elements", "70000", "--dtype", "bf16", "--state", "bf16", "--master", "none"});
  expect_report(one, "optimizer", 1);
  EXPECT_EQ(one.at("rows").at(0).at("bytes_per_element"), 3 * 4 + 2);  // adamw keeps two moments
}

TEST_F(BenchTest, OptimizersWithRoundsAreMeasuredInAllTheirPasses) {
  const Json adafactor = measured({"optimizer", "--elements", "70000", "--optimizer", "adafactor"});
  expect_report(adafactor, "optimizer", 4);
  // In f32 the gradient is read three times, and the parameter twice, and the parameter is written once.
  EXPECT_EQ(adafactor.at("rows").at(0).at("bytes_per_element"), 3 * 4 + 2 * 4 + 4);
  const Json muon = measured(
      {"optimizer", "--elements", "70000", "--optimizer", "muon", "--dtype", "f32", "--state", "f32"});
  expect_report(muon, "optimizer", 1);
  const Json& row = muon.at("rows").at(0);
  EXPECT_LT(row.at("limit"), row.at("limit_products"));
  EXPECT_LT(row.at("limit"), row.at("limit_memory"));
}

TEST_F(BenchTest, AStepIsComparedWithTheMachineAndTheDisk) {
  const std::vector<std::string> words = {"step",  "tiny", "--batch",  "1",
                                          "--seq", "32",   "--memory", "400MiB"};
  const Json in_memory = measured(words);
  expect_report(in_memory, "step", 1);
  EXPECT_EQ(in_memory.at("settings").at("bytes_read"), 0);
  EXPECT_FALSE(in_memory.at("rows").at(0).contains("peak_disk_read"));
  std::vector<std::string> disk = words;
  disk.insert(disk.end(), {"--disk", folder_.path() + ":256MiB", "--place-state", "disk"});
  const Json on_disk = measured(disk);
  expect_report(on_disk, "step", 1);
  EXPECT_GT(on_disk.at("settings").at("bytes_read"), 0);
  EXPECT_GT(on_disk.at("rows").at(0).at("limit_disk"), 0.0);
  EXPECT_GE(on_disk.at("rows").at(0).at("limit"), on_disk.at("rows").at(0).at("limit_disk"));
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
}

// Finds the processes that work on files of that process.
std::size_t processes_of(pid_t pid) {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::ifstream file(entry.path() / "cmdline");
    const std::string words{std::istreambuf_iterator<char>(file), {}};
    count += words.find("=/proc/" + std::to_string(pid) + "/") != std::string::npos ? 1 : 0;
  }
  return count;
}

TEST_F(BenchTest, AnInterruptLeavesNoFiles) {
  const std::vector<std::vector<std::string>> benches = {
      {"bench", "disk", folder_ / "disk", "--size", "64MiB", "--seconds", "60"},
      {"bench", "step", "mini", "--batch", "1", "--seq", "64", "--memory", "1GiB", "--disk",
       folder_ / "disk:512MiB", "--place-state", "disk", "--seconds", "60"}};
  std::filesystem::create_directories(folder_ / "disk");
  std::filesystem::create_directories(folder_ / "tmp");
  const Variable temporary("TMPDIR", folder_ / "tmp");
  for (const auto& words : benches) {
    SluiceProcess process(words);
    std::this_thread::sleep_for(
        std::chrono::milliseconds(1500));  // its files have no names that could be awaited
    process.signal(SIGINT);
    process.wait();
    EXPECT_TRUE(std::filesystem::is_empty(folder_ / "disk"));
    for (int i = 0; i < 100 && processes_of(process.pid()) > 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(processes_of(process.pid()), 0u);
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / "tmp"))
      EXPECT_THAT(entry.path().filename().string(), Not(HasSubstr("bench"))) << process.error();
  }
}

TEST_F(BenchTest, AnInterruptWhileTokensAreWrittenLeavesNone) {
  std::filesystem::create_directories(folder_ / "tmp");
  const Variable temporary("TMPDIR", folder_ / "tmp");
  const auto tokens = [&] {
    std::size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / "tmp"))
      count += entry.path().filename().string().starts_with("sluice-bench") ? 1 : 0;
    return count;
  };
  SluiceProcess process(
      {"bench", "step", "tiny", "--batch", "1000", "--accumulate", "1000", "--memory", "600MiB"});
  for (int i = 0; i < 1000 && tokens() == 0; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(tokens(), 1u);
  process.signal(SIGINT);
  process.wait();
  EXPECT_EQ(tokens(), 0u);
  EXPECT_THAT(process.error(), HasSubstr("stopped by Ctrl-C"));
}

TEST_F(BenchTest, BadInputIsRefused) {
  expect_refused({}, 2, "say what to measure");
  expect_refused({"foo"}, 2, "'foo' was not expected here");
  expect_refused({"disk"}, 2, "say which disk");
  expect_refused({"disk", folder_ / "none"}, 2, "make it, or name another");
  expect_refused({"disk", folder_.path(), "--size", "0"}, 2, "a size of 0");
  expect_refused({"disk", folder_.path(), "--size", "1MiB"}, 2, "at least 4.00 MiB");
  expect_refused({"optimizer", "--optimizer", "sgd", "--state", "8bit"}, 2, "without momentum");
  expect_refused({"disk", folder_.path(), "--size", "1000PiB"}, 2, "--size");
  expect_refused({"disk", folder_.path(), "--size", "1000TiB"}, 3, "are missing");
  expect_refused({"disk", folder_.path(), "--block", "1000"}, 2, "--block");
  expect_refused({"disk", folder_.path(), "--depth", "0"}, 2, "--depth");
  expect_refused({"disk", folder_.path(), "--depth", "1000"}, 2, "--depth");
  expect_refused({"disk", folder_.path(), "--blok", "1MiB"}, 2, "nearest known one is --block");
  expect_refused({"copy", "--seconds", "0"}, 2, "--seconds");
  expect_refused({"copy", "--size", "100TiB"}, 3, "give a smaller --size");
  expect_refused({"copy", "--threads", "0"}, 2, "--threads");
  expect_refused({"optimizer", "--elements", "0"}, 2, "--elements");
  expect_refused({"optimizer", "--elements", "999999999999"}, 3, "give fewer --elements");
  expect_refused({"optimizer", "--dtype", "f32", "--master", "none"}, 2, "their own masters");
  expect_refused({"optimizer", "--optimizer", "adamm"}, 2, "adamw");
  expect_refused({"step"}, 2, "say which model");
  expect_refused({"step", "gpt2-124n"}, 2, "neither a preset nor a folder");
  expect_refused({"step", "tiny", "--batch", "0"}, 2, "batch");
  expect_refused({"step", "tiny", "--memory", "10MiB"}, 3, "--memory");
}

TEST(BenchReportTest, TheRatioIsTheShareOfTheLimit) {
  EXPECT_DOUBLE_EQ(ratio_of({"rate", BenchUnit::kBytesPerSecond, 3, 4, "", {}}), 0.75);
  EXPECT_DOUBLE_EQ(ratio_of({"time", BenchUnit::kSeconds, 4, 3, "", {}}), 0.75);
}

}  // namespace sluice::cli::bench_test
