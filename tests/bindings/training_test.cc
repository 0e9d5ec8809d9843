#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include "bindings/run_outputs.h"
#include "core/json.h"
#include "testing.h"

namespace sluice::cli::training_test {

class TrainingTest : public ::testing::Test {
 protected:
  TrainingTest() { std::ofstream(text_) << lesson(); }

  std::vector<std::string> words(const std::string& name, int steps,
                                 const std::vector<std::string>& more = {}) const {
    const std::vector<std::string> flags = {
        "--accumulate", "2", "--threads", "2", "--metrics", folder_ / (name + ".jsonl")};
    return tiny_training(text_, folder_ / name, steps, {flags, more});
  }
  std::vector<double> losses(const std::string& name) const {
    std::vector<double> all;
    for (const Json& row : rows_of(folder_ / (name + ".jsonl"))) {
      all.push_back(row.at("loss"));
      EXPECT_EQ(row.at("step").get<std::size_t>(), all.size());
    }
    return all;
  }
  static void expect_rows_without_overlaps(const std::string& path) {
    using Event = std::pair<std::int64_t, std::int64_t>;  // begin and end in nanoseconds
    std::map<int, std::vector<Event>> rows;
    const Json trace = Json::parse(file_text(path));
    for (const Json& event : trace.at("traceEvents")) {
      if (event.at("ph") != "X") continue;
      const auto begin = std::llround(event.at("ts").get<double>() * 1e3);
      rows[event.at("tid")].emplace_back(begin, begin + std::llround(event.at("dur").get<double>() * 1e3));
    }
    for (auto& [row, events] : rows) {
      std::sort(events.begin(), events.end());
      for (std::size_t i = 1; i < events.size(); ++i)
        EXPECT_LE(events[i - 1].second, events[i].first) << "in row " << row;
    }
  }
  void wait_for_metrics(const std::string& name) const {
    for (int i = 0; i < 600 && file_text(folder_ / (name + ".jsonl")).empty(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  std::string step_folder(const std::string& name, int step) const {
    return folder_ / fmt::format("{}/step-{:08}", name, step);
  }

  TemporaryFolder folder_;
  std::string text_ = folder_ / "text.txt";
};

// Everything is on disk. (That this changes no bit is in tests/python/cli/test_runs.py.)
TEST_F(TrainingTest, TheLossFallsAndWhatIsWrittenIsWhole) {
  const std::string trace = folder_ / "trace.json";
  const Outcome run =
      run_sluice(words("a", 20,
                       {"--eval-every", "10", "--trace", trace, "--disk", folder_.path() + ":1GiB",
                        "--place-parameters", "disk", "--place-gradients", "disk", "--place-state", "disk"}));
  if (run.error.find("O_DIRECT") != std::string::npos)
    GTEST_SKIP() << "the temporary folder has no O_DIRECT: " << run.error;
  expect_done(run);
  const auto found = losses("a");
  ASSERT_EQ(found.size(), 20u);
  EXPECT_NEAR(found.front(), 5.545, 0.5);  // log(256), since the model knows nothing at first
  EXPECT_LT(found.back(), found.front() - 0.5);
  const auto inspected = [](const std::vector<std::string>& more) {
    const Outcome outcome = run_sluice([&] {
      std::vector<std::string> all = {"inspect", "--json"};
      all.insert(all.end(), more.begin(), more.end());
      return all;
    }());
    expect_done(outcome);
    return Json::parse(outcome.out);
  };
  EXPECT_EQ(inspected({"--verify", step_folder("a", 20)}).at("step"), 20);
  const Json metrics = inspected({folder_ / "a.jsonl"}), report = inspected({trace});
  EXPECT_EQ(metrics.at("lines"), 20);
  EXPECT_GT(metrics.at("disk_written").get<std::uint64_t>(), 0u);
  expect_rows_without_overlaps(trace);
  ASSERT_EQ(report.at("lanes").size(), 7u);
  for (const Json& lane : report.at("lanes")) {
    const bool is_wait = lane.at("name").get<std::string>().ends_with("wait");  // of which there may be none
    EXPECT_TRUE(is_wait || lane.at("busy_seconds") > 0) << lane;
    EXPECT_LE(lane.at("busy_seconds"), report.at("wall_seconds")) << lane;
  }
}

TEST_F(TrainingTest, InspectCountsTheTimeOfOverlappingEventsOnce) {
  std::ofstream(folder_ / "trace.json") << R"({"traceEvents": [
      {"ph": "M", "name": "thread_name", "tid": 1, "cat": "read", "args": {"name": "read"}},
      {"ph": "X", "name": "a", "tid": 1, "cat": "read", "ts": 2000000, "dur": 1000000, "args": {"bytes": 5}},
      {"ph": "X", "name": "b", "tid": 2, "cat": "read", "ts": 2500000, "dur": 1000000, "args": {"bytes": 6}},
      {"ph": "X", "name": "c", "tid": 1, "cat": "read", "ts": 2600000, "dur": 1},
      {"ph": "X", "name": "d", "tid": 3, "cat": "write", "ts": 5000000, "dur": 1000000}]})";
  const Outcome outcome = run_sluice({"inspect", "--json", folder_ / "trace.json"});
  expect_done(outcome);
  const Json report = Json::parse(outcome.out);
  EXPECT_DOUBLE_EQ(report.at("wall_seconds"), 4);
  const Json& read = report.at("lanes").at(0);
  EXPECT_EQ(read.at("name"), "read");
  EXPECT_EQ(read.at("events"), 3);
  EXPECT_DOUBLE_EQ(read.at("busy_seconds"), 1.5);
  EXPECT_DOUBLE_EQ(read.at("busy_share"), 0.375);
  EXPECT_EQ(read.at("bytes"), 11);
  EXPECT_DOUBLE_EQ(report.at("lanes").at(1).at("busy_seconds"), 1);
}

TEST_F(TrainingTest, ASignalSavesAndStopsAndTheRunGoesOn) {
  const auto before = ::signal(SIGHUP, SIG_DFL);  // which nohup has this program ignore
  for (const auto& [number, name] :
       {std::pair(SIGTERM, "SIGTERM"), {SIGUSR1, "SIGUSR1"}, {SIGINT, "Ctrl-C"}, {SIGHUP, "SIGHUP"}}) {
    SluiceProcess process(words(name, 1'000'000));
    wait_for_metrics(name);
    process.signal(number);
    EXPECT_EQ(process.wait(), 0) << process.error();
    const int done = static_cast<int>(losses(name).size());
    ASSERT_GE(done, 1);
    EXPECT_THAT(process.out(),
                HasSubstr(fmt::format("stopped by {}: saved after step {} of 1000000", name, done)));
    EXPECT_EQ(tensors_of(folder_ / name, done).size(), 3u);
  }
  ::signal(SIGHUP, before);
  const int done = static_cast<int>(losses("SIGTERM").size());
  succeed(words("SIGTERM", done + 2, {"--resume"}));
  EXPECT_EQ(losses("SIGTERM").size(), static_cast<std::size_t>(done) + 2);
}

// Under nohup SIGHUP is ignored.
TEST_F(TrainingTest, AHangupThatIsIgnoredStopsNothing) {
  const auto before = ::signal(SIGHUP, SIG_IGN);
  SluiceProcess process(words("nohup", 1'000'000));
  ::signal(SIGHUP, before);
  wait_for_metrics("nohup");
  process.signal(SIGHUP);
  const std::size_t steps = losses("nohup").size();
  for (int i = 0; i < 600 && losses("nohup").size() < steps + 3; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  process.signal(SIGTERM);
  EXPECT_EQ(process.wait(), 0) << process.error();
  EXPECT_THAT(process.out(), HasSubstr("SIGTERM"));
  EXPECT_GE(losses("nohup").size(), steps + 3);
}

TEST_F(TrainingTest, ASecondCtrlCStopsAtOnce) {
  SluiceProcess process(words("twice", 1'000'000));
  wait_for_metrics("twice");
  process.signal(SIGSTOP);
  process.signal(SIGTERM);  // the first request, on which the stopped process cannot act yet
  process.signal(SIGINT);
  process.signal(SIGCONT);
  const int status = process.wait();
  // The two signals may be delivered in either order. In the other order the run saves and stops.
  EXPECT_TRUE(status == 130 || status == 0) << status;
}

TEST_F(TrainingTest, AnotherRunsFolderSettingsAndDataAreRefused) {
  succeed(words("first", 2));
  const std::string before = file_text(step_folder("first", 2) + "/manifest.json");
  const auto expect_refused = [&](int steps, const std::vector<std::string>& more, const std::string& part) {
    const Outcome outcome = run_sluice(words("first", steps, more));
    EXPECT_EQ(outcome.status, 2);
    EXPECT_EQ(outcome.out.empty(), steps <= 2);  // there is no plan where nothing is left to do
    EXPECT_THAT(outcome.error, HasSubstr(part));
  };
  expect_refused(2, {}, "--resume");
  expect_refused(1, {"--resume"}, "'" + step_folder("first", 2) + "' is at step 2, beyond --steps 1");
  expect_refused(4, {"--resume", "--seed", "9"}, "seed was 1 and is 9");
  expect_refused(4, {"--resume", "--optimizer", "lion"}, R"(optimizer was "adamw" and is "lion")");
  std::fstream(text_, std::ios::in | std::ios::out).seekp(20000).put('#');  // as long as before
  expect_refused(4, {"--resume"}, "data_fingerprint was");
  EXPECT_EQ(file_text(step_folder("first", 2) + "/manifest.json"), before);
  EXPECT_EQ(losses("first").size(), 2u);
}

TEST_F(TrainingTest, ADamagedCheckpointIsNamed) {
  succeed(words("damaged", 2, {"--save-every", "1"}));
  const std::string path = step_folder("damaged", 2) + "/optimizer.exp_avg.safetensors";
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-5, std::ios::end);
  file.put('\x55');
  file.close();
  const Outcome verified = run_sluice({"inspect", "--verify", folder_ / "damaged"});
  EXPECT_NE(verified.status, 0);
  EXPECT_THAT(verified.error, HasSubstr(path));
  expect_refusal(
      words("damaged", 4, {"--resume"}), 2,
      {"exp_avg", "move '" + step_folder("damaged", 2) + "' away to go on from the checkpoint before it, '" +
                      step_folder("damaged", 1) + "'"});
}

TEST_F(TrainingTest, ALossThatIsNotFiniteStopsTheRun) {
  for (const char* clip : {"1", "0"}) {
    const Outcome outcome = run_sluice(
        words(std::string("wild") + clip, 200, {"--lr", "900000", "--save-every", "1", "--clip", clip}));
    EXPECT_EQ(outcome.status, 2);
    EXPECT_THAT(outcome.error, HasSubstr("not finite"));
    EXPECT_THAT(outcome.error, HasSubstr("the last checkpoint stands"));
    const std::size_t step = outcome.error.find("in step ");
    ASSERT_NE(step, std::string::npos);
    EXPECT_EQ(outcome.error.find("in step ", step + 1), std::string::npos) << outcome.error;
  }
}

TEST_F(TrainingTest, AFullDiskUnderTheMetricsLosesNoStep) {
  expect_refusal(words("full", 9, {"--metrics", "/dev/full", "--trace", folder_ / "full.json"}), 1,
                 {"'/dev/full'", step_folder("full", 1)});
  succeed({"inspect", "--verify", step_folder("full", 1)});
  const Outcome verified = run_sluice({"inspect", "--verify", folder_ / "full"});
  expect_done(verified);
  EXPECT_THAT(verified.out, HasSubstr("every byte is as it was written"));
  succeed({"inspect", folder_ / "full.json"});  // the trace shows what led to the error
  succeed(words("full", 3, {"--resume"}));
  EXPECT_TRUE(std::filesystem::exists(step_folder("full", 3)));
}

TEST_F(TrainingTest, AMetricsFileBelongsToItsRun) {
  succeed(words("own", 3));
  const std::string before = file_text(folder_ / "own.jsonl");
  expect_refusal(words("other", 3, {"--metrics", folder_ / "own.jsonl", "--resume"}), 2,
                 {"the metrics of another run"});
  EXPECT_EQ(file_text(folder_ / "own.jsonl"), before);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "other"));
  const Outcome done = run_sluice(words("own", 3, {"--resume"}));
  expect_done(done);
  EXPECT_THAT(done.out, HasSubstr("nothing left to do"));
  EXPECT_EQ(file_text(folder_ / "own.jsonl"), before);
}

TEST_F(TrainingTest, ARunThatWasKilledBeforeItsFirstCheckpointKeepsItsMetricsFile) {
  SluiceProcess process(words("killed", 1'000'000));
  wait_for_metrics("killed");
  process.signal(SIGKILL);
  process.wait();
  succeed(words("killed", 2, {"--resume"}));
  EXPECT_EQ(losses("killed").size(), 2u);
}

// Runs a command that may write files of up to 1 MiB.
std::vector<std::string> with_a_file_limit(const std::vector<std::string>& words) {
  const std::string command = "ulimit -f 2048; exec \"$0\" \"$@\" > /dev/null";
  std::vector<std::string> all = {"-c", command, sluice_path()};
  all.insert(all.end(), words.begin(), words.end());
  return all;
}

TEST_F(TrainingTest, ARunWarnsOfCheckpointsInMemory) {
  if (::access("/dev/shm", W_OK) != 0) GTEST_SKIP() << "no /dev/shm";
  const std::string out = "/dev/shm/sluice-test-" + std::to_string(::getpid());
  const Outcome outcome = run_sluice(words("memory", 1, {"--out", out}));
  std::filesystem::remove_all(out);
  expect_done(outcome);
  EXPECT_THAT(outcome.error, HasSubstr("'" + out + "' lies in memory"));
}

TEST_F(TrainingTest, AFileSizeLimitIsReportedBeforeTheFirstStep) {
  SluiceProcess process(with_a_file_limit(words("limited", 2)), "/bin/sh");
  EXPECT_EQ(process.wait(), 3);
  EXPECT_THAT(process.error(), HasSubstr("ulimit -f"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "limited"));
}

TEST_F(TrainingTest, MeasuringADiskStaysWithinItsLimit) {
  // The process may write files of 1 MiB at most, so a measurement with a larger file would fail.
  std::vector<std::string> plan = without(words("none", 2, {"--disk", folder_.path() + ":1MiB"}), "--out");
  plan[0] = "plan";
  SluiceProcess process(with_a_file_limit(plan), "/bin/sh");
  const int status = process.wait();
  if (process.error().find("O_DIRECT") != std::string::npos ||
      process.error().find("lies in memory") != std::string::npos)
    GTEST_SKIP() << "the temporary folder is on no disk: " << process.error();
  EXPECT_EQ(status, 0) << process.error();
}

TEST_F(TrainingTest, JsonOfAPathThatIsNotUtf8IsStillJson) {
  const std::string path = folder_ / "a\xff.bin";
  std::ofstream(path, std::ios::binary) << std::string(200, '\1');
  const Outcome outcome = run_sluice({"inspect", "--json", path});
  expect_done(outcome);
  EXPECT_EQ(Json::parse(outcome.out).at("tokens"), 100);
}

TEST_F(TrainingTest, GeneratesFromTokenIdsWhatItGeneratesFromTheirText) {
  succeed(words("g", 2));
  const auto generate = [&](const std::string& flag, const std::string& prompt, const std::string& output) {
    return run_sluice({"generate", "--checkpoint", folder_ / "g", flag, prompt, "--output", output,
                       "--tokens", "8", "--memory", "600MiB", "--threads", "2"});
  };
  const Outcome text = generate("--prompt", "abc", "auto");
  expect_done(text);
  EXPECT_EQ(text.out.substr(0, 3), "abc");
  std::string ids;
  for (const char c : text.out.substr(3, 8)) ids += fmt::format("{}\n", static_cast<unsigned char>(c));
  EXPECT_EQ(generate("--prompt", "abc", "tokens").out, ids);
  EXPECT_EQ(generate("--prompt-tokens", "97,98,99", "tokens").out, ids);
  EXPECT_EQ(generate("--prompt-tokens", "97 98 99", "auto").out, text.out.substr(3));
  EXPECT_THAT(
      generate("--prompt-tokens", "97,256", "tokens").error,
      AllOf(HasSubstr("'256' is not a token id below 256"), HasSubstr("generate --tokenizer FOLDER")));
  EXPECT_THAT(generate("--prompt-tokens", " ", "tokens").error, HasSubstr("--prompt-tokens at least one"));
  EXPECT_THAT(
      run_sluice({"generate", "--checkpoint", folder_ / "g", "--prompt", "a", "--prompt-tokens", "1"}).error,
      HasSubstr("one prompt is needed"));
  const std::string config = step_folder("g", 2) + "/config.json";
  std::string damaged = file_text(config);
  damaged[damaged.find('\n')] = ' ';  // keeps the length, and is still JSON
  std::ofstream(config) << damaged;
  const Outcome refused = generate("--prompt", "abc", "auto");
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.error, HasSubstr("is not what was written with this checkpoint"));
}

}  // namespace sluice::cli::training_test
