#include <sys/resource.h>
#include <sys/stat.h>

#include "bindings/ranks_runs.h"
#include "testing.h"

// A person may put things in the program's way on purpose: it says so, ends by itself, and changes nothing.
namespace sluice::cli::hostile_input_test {

using std::chrono::steady_clock;

class HostileInputTest : public ::testing::Test {
 protected:
  HostileInputTest() { std::ofstream(text_) << lesson(); }

  std::vector<std::string> train(const std::vector<std::string>& more) const {
    return with_flags({"train", "--model", "tiny", "--data", text_, "--memory", "300MiB", "--seq", "32",
                       "--threads", "1", "--batch", "1", "--steps", "1"},
                      more);
  }
  static void expect_refused(const std::vector<std::string>& words, const std::string& part) {
    expect_refusal(words, 2, {part});
  }
  // A model of many small layers, in a folder without weights.
  std::string deep_model(int layers) const {
    const std::string path = folder_ / ("layers" + std::to_string(layers));
    std::filesystem::create_directory(path);
    std::ofstream(path + "/config.json")
        << R"({"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
               "max_position_embeddings": 64, "vocab_size": 256, "num_hidden_layers": )"
        << layers << "}";
    return path;
  }
  TemporaryFolder folder_;
  const std::string text_ = folder_ / "text.txt";
};

TEST_F(HostileInputTest, APlantedLinkIsNotWrittenThrough) {
  std::ofstream(folder_ / "victim") << "kept";
  std::filesystem::create_directory(folder_ / "out");
  std::filesystem::create_symlink("../victim", folder_ / "out/.lock");
  expect_refused(train({"--out", folder_ / "out"}), ".lock' is a link");
  EXPECT_EQ(file_text(folder_ / "victim"), "kept");
}

TEST_F(HostileInputTest, WhatIsNoFileIsNotWaitedFor) {
  const std::string model = deep_model(1), pipe = folder_ / "pipe";
  std::filesystem::create_directory(folder_ / "pipes");
  for (const std::string& path : {pipe + ".safetensors", pipe + ".jsonl", pipe + ".json", pipe + ".bin",
                                  model + "/model.safetensors", folder_ / "pipes/config.json"})
    ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  for (const char* kind : {".safetensors", ".jsonl", ".json", ".bin"})
    expect_refused({"inspect", pipe + kind}, "a named pipe");
  expect_refused({"inspect", model}, "a named pipe");
  expect_refused(train({"--config", pipe + ".json"}), "a named pipe");
  expect_refused(train({"--config", "/dev/zero"}), "a device");
  expect_refused(train({"--valid", pipe + ".bin"}), "a named pipe");
  for (const std::string& bad : {model, folder_ / "pipes"}) {
    expect_refused(train({"--model", bad}), "a named pipe");
    expect_refused({"generate", "--checkpoint", bad, "--prompt", "a"}, "a named pipe");
  }
}

std::string shell_line(const std::vector<std::string>& words, const std::string& redirections) {
  std::string line = "'" + sluice_path() + "'";
  for (const std::string& word : words) line += " '" + word + "'";
  return line + " " + redirections;
}
int status_with(const std::vector<std::string>& words, const std::string& redirections) {
  const int raw = std::system(shell_line(words, redirections).c_str());
  return WIFEXITED(raw) ? WEXITSTATUS(raw) : 1000;
}

TEST_F(HostileInputTest, AnErrorThatCannotBeWrittenKeepsItsStatus) {
  for (const char* stream : {"2>/dev/full", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"}) {
    EXPECT_EQ(status_with({"train", "--model", "nope"}, stream), 2) << stream;
    EXPECT_EQ(status_with({"train", "--errors", "json", "--model", "nope"}, stream), 2) << stream;
    EXPECT_EQ(status_with({"plan", "--model", "tiny", "--data", text_, "--memory", "1MiB"}, stream), 3)
        << stream;
    EXPECT_EQ(status_with({"inspect", folder_ / "missing"}, stream), 2) << stream;
  }
}

TEST_F(HostileInputTest, NumbersHaveBounds) {
  for (const char* prefetch : {"0", "65", "1000000", "18446744073709551615"})
    expect_refused(train({"--prefetch", prefetch}), "a prefetch depth of " + std::string(prefetch));
  expect_refused(train({"--accumulate", "1000000000"}), "accumulate");
  expect_refused(train({"--batch", "18446744073709551615"}), "1000000, 18446744073709551615 was given");
  for (const char* flag : {"--silence", "--patience"})
    for (const char* seconds : {"0", "10000000000", "18446744073709551615"})
      expect_refused(train({"--ranks", "2", "--accumulate", "2", flag, seconds}), std::string(flag) + ": ");
}

TEST_F(HostileInputTest, PlanningADeepModelTakesTimeByItsLayers) {
  const auto cpu_seconds = [] {
    rusage used = {};
    ::getrusage(RUSAGE_CHILDREN, &used);
    return static_cast<double>(used.ru_utime.tv_sec) + static_cast<double>(used.ru_utime.tv_usec) / 1e6;
  };
  const double before = cpu_seconds();
  succeed({"plan", "--model", deep_model(10'000), "--data", text_, "--memory", "8GiB", "--seq", "32",
           "--batch", "1", "--threads", "1"});
  EXPECT_LT(cpu_seconds() - before, 12);
}

// Waits until the process takes signals as requests; before that they end it as they end any other.
void wait_for_signals(pid_t process) {
  const std::string path = "/proc/" + std::to_string(process) + "/status";
  for (int look = 0; look < 3000; ++look) {
    const std::string status = file_text(path);
    const std::size_t at = status.find("SigBlk:\t");
    if (at != std::string::npos &&
        (std::stoull(status.substr(at + 8), nullptr, 16) >> (SIGTERM - 1) & 1) != 0)
      return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ADD_FAILURE() << "it never waits for signals";
}

// The first file that is opened would take the number of a closed stream, and get what is written to it.
TEST_F(HostileInputTest, AClosedStreamBecomesNoFileOfTheRun) {
  const std::string line = shell_line(train({"--model", deep_model(1000)}), "<&- 2>&-");
  SluiceProcess process({"-c", "exec " + line}, "/bin/sh");
  wait_for_signals(process.pid());
  for (const char* stream : {"0", "2"})
    EXPECT_EQ(std::filesystem::read_symlink("/proc/" + std::to_string(process.pid()) + "/fd/" + stream),
              "/dev/null");
}

TEST_F(HostileInputTest, AStopIsHeardBeforeTheFirstStep) {
  const std::vector<std::string> words = train({"--model", deep_model(3'000), "--memory", "2GiB", "--disk",
                                                folder_.path() + ":1GiB", "--out", folder_ / "out"});
  for (const auto& [number, name] : {std::pair{SIGTERM, "SIGTERM"}, {SIGINT, "Ctrl-C"}}) {
    SluiceProcess process(words);
    wait_for_signals(process.pid());
    process.signal(number);
    const auto begin = steady_clock::now();
    EXPECT_EQ(process.wait(), 0) << process.error();
    EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(5));
    EXPECT_THAT(process.error(), AllOf(HasSubstr(name), HasSubstr("nothing was saved")));
    EXPECT_EQ(process.out().find("step 1"), std::string::npos);
  }
}

TEST_F(HostileInputTest, AStopOfARankIsHeardByAllBeforeTheFirstStep) {
  const std::vector<std::string> words =
      train({"--model", deep_model(3'000), "--memory", "2GiB", "--disk", folder_.path() + ":1GiB", "--ranks",
             "2", "--accumulate", "2"});
  for (const int rank : {0, 1}) {
    SluiceProcess process(words);
    std::vector<pid_t> others;
    for (const auto until = steady_clock::now() + std::chrono::seconds(30);
         others.empty() && steady_clock::now() < until;)
      others = children_of(process.pid());
    ASSERT_EQ(others.size(), 1u) << process.error();
    wait_for_signals(others[0]);
    const auto begin = steady_clock::now();
    ::kill(rank == 0 ? process.pid() : others[0], SIGTERM);
    EXPECT_EQ(process.wait(), 0) << process.error();
    EXPECT_TRUE(ends_within(others[0], std::chrono::seconds(1))) << "rank 1 goes on";
    EXPECT_LT(steady_clock::now() - begin, std::chrono::seconds(5));
    EXPECT_EQ(process.error(), "sluice: stopped by SIGTERM before the first step; nothing was saved\n");
  }
}

TEST_F(HostileInputTest, NamesFromFilesDoNotReachTheTerminalAsTheyAre) {
  std::ofstream(folder_ / "t.safetensors", std::ios::binary) << [&] {
    std::string header =
        R"({"a\u001b[2J\u009b0m\u007f\r\n": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    std::string file(8, '\0');
    file[0] = static_cast<char>(header.size());
    return file + header + std::string(4, '\0');
  }();
  const std::string shown = succeed({"inspect", folder_ / "t.safetensors"});
  EXPECT_THAT(shown, HasSubstr(R"(a\x1b[2J\xc2\x9b0m\x7f\x0d\n)"));
  std::ofstream(folder_ / "c.json") << R"({"\u001b[31m": 1})";
  const Outcome refused = run_sluice(train({"--config", folder_ / "c.json"}));
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.error, AllOf(HasSubstr(R"(\x1b[31m)"), Not(HasSubstr("\x1b"))));
  const Outcome missing = run_sluice({"inspect", folder_ / ("\x1b]0;x\x07.bin")});
  EXPECT_THAT(missing.error, Not(HasSubstr("\x1b")));
}

}  // namespace sluice::cli::hostile_input_test
