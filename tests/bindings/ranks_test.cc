#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <thread>

#include "bindings/run_outputs.h"
#include "bindings/sluice_process.h"
#include "core/json.h"

// Runs of several ranks, as users start them. Whatever is partitioned, and wherever it lies, the bits are
// those of ranks that each have everything.
namespace sluice::cli {
namespace {

using std::chrono::steady_clock;
using ::testing::HasSubstr;

struct Partition {
  int ranks;
  std::string stage, place, flags;
};
void PrintTo(const Partition& p, std::ostream* to) {
  *to << p.ranks << " ranks, stage " << p.stage << ", " << p.place << ", " << p.flags;
}

class RanksTest : public ::testing::Test {
 protected:
  RanksTest() {
    std::ofstream(text_) << lesson();
    std::filesystem::create_directory(folder_ / "model");
    std::filesystem::create_directory(folder_ / "disk");
    // Its blocks are larger than what is packed, and so are partitioned.
    std::ofstream(folder_ / "model/config.json") << Json({{"model_type", "llama"},
                                                          {"hidden_size", 128},
                                                          {"intermediate_size", 320},
                                                          {"num_hidden_layers", 3},
                                                          {"num_attention_heads", 4},
                                                          {"num_key_value_heads", 2},
                                                          {"max_position_embeddings", 64},
                                                          {"vocab_size", 1200},
                                                          {"tie_word_embeddings", true}});
  }
  std::vector<std::string> words(const std::string& name, int ranks, int steps, const std::string& flags,
                                 const std::string& memory = "600MiB") const {
    std::vector<std::string> all =
        tiny_training(text_, folder_ / name, steps,
                      {{"--model", folder_ / "model", "--tokens", "bytes", "--accumulate", "12", "--threads",
                        "1", "--ranks", std::to_string(ranks), "--metrics", folder_ / (name + ".jsonl")}});
    *(std::ranges::find(all, "--memory") + 1) = memory;
    all.erase(all.begin() + 1, all.begin() + 3);  // the other model
    std::istringstream more(flags);
    for (std::string word; more >> word;) all.push_back(word);
    return all;
  }
  std::vector<std::string> placed(const std::string& name, const Partition& p, int steps) const {
    std::string flags = p.flags;
    if (p.ranks > 1) flags += " --stage " + p.stage;
    for (const char* part : {"parameters", "gradients", "state"})
      flags += std::string(" --place-") + part + " " + p.place;
    if (p.place == "disk") flags += " --disk " + (folder_ / "disk");
    return words(name, p.ranks, steps, flags);
  }
  static void expect_done(const Outcome& outcome) {
    ASSERT_EQ(outcome.status, 0) << outcome.error << outcome.out;
  }

  std::map<std::string, std::string> tensors(const std::string& name, int step) const {
    return tensors_of(folder_ / name, step);
  }
  std::vector<Json> rows(const std::string& name) const { return rows_of(folder_ / (name + ".jsonl")); }
  std::vector<double> losses(const std::string& name) const { return losses_of(folder_ / (name + ".jsonl")); }
  TemporaryFolder folder_;
  const std::string text_ = folder_ / "lesson.txt";
};

class PartitionTest : public RanksTest, public ::testing::WithParamInterface<Partition> {};
// Every two of stage, place, optimizer and number of ranks are together in one of them.
INSTANTIATE_TEST_SUITE_P(
    Partitions, PartitionTest,
    ::testing::Values(Partition{2, "1", "memory", "--optimizer adamw"},
                      Partition{3, "2", "memory", "--optimizer adamw --state 8bit --dtype bf16"},
                      Partition{4, "3", "disk", "--optimizer adamw --clip 0"},
                      Partition{3, "1", "disk", "--optimizer adafactor"},
                      Partition{4, "2", "memory", "--optimizer adafactor --beta1 0.9 --clip 0"},
                      Partition{2, "3", "memory", "--optimizer adafactor --dtype bf16 --master none"},
                      Partition{4, "1", "memory", "--optimizer muon"},
                      Partition{2, "2", "disk", "--optimizer muon --state bf16 --group 6"},
                      Partition{3, "3", "memory", "--optimizer muon --dtype bf16"},
                      Partition{3, "3", "disk", "--optimizer adamw --state 8bit --group 4"},
                      Partition{2, "2", "disk", "--optimizer lion --dtype f16 --initial-scale 1e30"},
                      Partition{4, "3", "memory", "--optimizer adamw --dtype bf16 --recompute full"}));

TEST_P(PartitionTest, HasTheBitsOfRanksThatHaveEverything) {
  Partition whole = GetParam();
  whole.stage = "0";
  whole.place = "memory";
  expect_done(run_sluice(placed("whole", whole, 3)));
  expect_done(run_sluice(placed("parts", GetParam(), 3)));
  EXPECT_EQ(losses("parts"), losses("whole"));
  EXPECT_TRUE(tensors("parts", 3) == tensors("whole", 3));
}

// The two pairs above in which a group has all micro-batches write such shards.
TEST_F(RanksTest, WhatAStageKeepsOfFinalGradientsOnDiskIsAShard) {
  const auto on_disk = [&](const std::string& stage) {
    std::vector<std::string> all =
        placed("plan", {2, stage, "disk", "--optimizer adamw --group 6 --json"}, 3);
    all[0] = "plan";
    const Outcome outcome = run_sluice(all);
    EXPECT_EQ(outcome.status, 0) << outcome.error;
    return Json::parse(outcome.out).at("bytes").at("disk").at("gradient").get<double>();
  };
  const double whole = on_disk("1"), shards = on_disk("2");
  EXPECT_LT(shards, 0.7 * whole);  // the embedding has two uses, and is whole
  EXPECT_GT(shards, 0.4 * whole);
}

class ReproducibleTest : public RanksTest, public ::testing::WithParamInterface<Partition> {};
// 12 micro-batches: with 2 and 4 ranks each rank gives two sums, with 3 ranks one.
INSTANTIATE_TEST_SUITE_P(
    Partitions, ReproducibleTest,
    ::testing::Values(Partition{2, "0", "memory", "--optimizer adamw"},
                      Partition{3, "3", "memory", "--optimizer adamw --state 8bit --dtype bf16"},
                      Partition{4, "2", "memory", "--optimizer adamw --clip 0"},
                      Partition{2, "3", "disk", "--optimizer adafactor"},
                      Partition{3, "0", "disk", "--optimizer adafactor --clip 0 --group 3"},
                      Partition{4, "1", "memory", "--optimizer muon --dtype bf16 --master none"},
                      Partition{3, "2", "disk", "--optimizer muon --group 1"},
                      Partition{4, "3", "memory", "--optimizer lion --dtype f16 --group 2"}));

TEST_P(ReproducibleTest, HasTheBitsOfOneRank) {
  Partition parts = GetParam();
  parts.flags += " --reproducible";
  expect_done(run_sluice(placed("parts", parts, 3)));
  Partition alone = parts;
  alone.ranks = 1;
  alone.place = "memory";
  if (const std::size_t group = alone.flags.find("--group"); group != std::string::npos)
    alone.flags.replace(group, 9, "--group 5");
  expect_done(run_sluice(placed("alone", alone, 3)));
  EXPECT_EQ(losses("parts"), losses("alone"));
  EXPECT_TRUE(tensors("parts", 3) == tensors("alone", 3));
}

TEST_F(RanksTest, HaveNoMetricsBesideAPipeOrADevice) {
  std::vector<std::string> all = words("run", 2, 2, "");
  *(std::ranges::find(all, "--metrics") + 1) = "/dev/null";
  expect_done(run_sluice(all));
  EXPECT_FALSE(std::filesystem::exists("/dev/null.rank1"));
}

// The head alone writes the first use of a tied embedding's unit, and leaves the positions' out.
TEST_F(RanksTest, ThatAreReproducibleHaveTheBitsOfOneInUsesThatNothingWrites) {
  const auto of_gpt2 = [&](const std::string& name, int ranks, const std::string& flags) {
    std::vector<std::string> all = words(name, ranks, 2, flags + " --reproducible");
    *(std::ranges::find(all, "--model") + 1) = "tiny";
    return all;
  };
  expect_done(run_sluice(of_gpt2("parts", 2, "--stage 3")));
  for (const char* group : {"1", "4", "12"}) {  // with 4 and 12 the smaller sums have no buffer of their own
    const std::string alone = std::string("alone") + group;
    expect_done(run_sluice(of_gpt2(alone, 1, std::string("--group ") + group)));
    EXPECT_EQ(losses(alone), losses("parts"));
    EXPECT_TRUE(tensors(alone, 2) == tensors("parts", 2)) << group;
  }
}

// What is predicted is never passed, and the order is another one than that of a run that adds one after
// another.
TEST_F(RanksTest, ThatAreReproducibleTakeWhatThePlanSays) {
  for (const char* flags : {"", "--group 1", "--clip 0"}) {
    const Outcome outcome =
        run_sluice(words(std::string("run") + flags, 1, 3, std::string(flags) + " --reproducible"));
    expect_done(outcome);
    const std::size_t error = outcome.out.find(" predicted (");
    ASSERT_NE(error, std::string::npos);
    EXPECT_LE(std::stod(outcome.out.substr(error + 12)), 0.0) << outcome.out;
  }
  expect_done(run_sluice(words("folded", 1, 3, "")));
  EXPECT_EQ(losses("folded")[0], losses("run")[0]);
  EXPECT_FALSE(tensors("folded", 3) == tensors("run", 3));
}

TEST_F(RanksTest, LearnWhatOneRankLearns) {
  expect_done(run_sluice(words("alone", 1, 3, "--eval-every 3")));
  for (const int ranks : {2, 3}) {
    const std::string name = std::to_string(ranks);
    expect_done(run_sluice(words(name, ranks, 3, "--eval-every 3 --stage 3")));
    ASSERT_EQ(losses(name).size(), 3u);
    EXPECT_EQ(losses(name)[0], losses("alone")[0]);  // losses are added in the order of the micro-batches
    EXPECT_NEAR(losses(name)[2], losses("alone")[2], 1e-4);
    EXPECT_NE(losses(name)[2], losses(name)[0]);
  }
}

TEST_F(RanksTest, GoOnFromACheckpointOfAnyNumberOfRanks) {
  expect_done(run_sluice(words("straight", 3, 4, "--stage 2")));
  expect_done(run_sluice(words("stopped", 3, 2, "--stage 2")));
  expect_done(run_sluice(words("stopped", 3, 4, "--stage 3 --resume")));
  EXPECT_TRUE(tensors("stopped", 4) == tensors("straight", 4));
  for (const int ranks : {1, 2, 4}) {
    const std::string name = "at" + std::to_string(ranks);
    std::filesystem::create_directory(folder_ / name);
    std::filesystem::copy(folder_ / "stopped/step-00000002", folder_ / (name + "/step-00000002"),
                          std::filesystem::copy_options::recursive);
    std::filesystem::copy_file(folder_ / "stopped.jsonl", folder_ / (name + ".jsonl"));
    const Outcome outcome = run_sluice(words(name, ranks, 4, "--resume"));
    EXPECT_EQ(outcome.status, 0) << outcome.error;
    EXPECT_EQ(tensors(name, 4).size(), tensors("straight", 4).size());
  }
}

TEST_F(RanksTest, TakeWhatThePlanSays) {
  for (const char* stage : {"0", "3"}) {
    const Outcome outcome = run_sluice(words(stage, 2, 3, std::string("--stage ") + stage));
    expect_done(outcome);
    EXPECT_THAT(outcome.out, HasSubstr(std::string("this is rank 0 of 2, at stage ") + stage));
    const std::size_t error = outcome.out.find(" predicted (");
    ASSERT_NE(error, std::string::npos);
    EXPECT_LE(std::stod(outcome.out.substr(error + 12)), 0.0) << outcome.out;
  }
}

// What is gathered after a step may come in the next one, so that ten steps are taken together.
TEST_F(RanksTest, ReceiveWhatThePlanSays) {
  for (const std::string stage : {"0", "1", "2", "3"})
    for (const std::string more : {"", " --reproducible"}) {
      const std::string flags = "--stage " + stage + more;
      const Outcome plan = run_sluice([&] {
        std::vector<std::string> all = words("none", 4, 3, flags);
        all[0] = "plan";
        all.push_back("--json");
        return all;
      }());
      expect_done(plan);
      const double planned = Json::parse(plan.out).at("step").at("bytes_received").get<double>();
      expect_done(run_sluice(words("run" + flags, 4, 11, flags)));
      double received = 0;
      for (int step = 1; step <= 10; ++step)
        received += rows("run" + flags).at(static_cast<std::size_t>(step)).at("received").get<double>() / 10;
      // At stage 3 some parameters may still be there when they are needed again. Of the embedding's rows the
      // plan counts one for each token, and tokens occur more than once.
      EXPECT_GE(received, (stage == "3" ? 0.5 : 0.85) * planned) << flags;
      EXPECT_LE(received, 1.06 * planned) << flags;
    }
}

TEST_F(RanksTest, HaveOneWhoWritesAboutTheRun) {
  expect_done(run_sluice(
      words("traced", 3, 4,
            "--stage 2 --trace " + (folder_ / "trace.json") + " --profile " + (folder_ / "profile.html"))));
  EXPECT_EQ(losses("traced").size(), 4u);
  const Outcome trace = run_sluice({"inspect", "--json", folder_ / "trace.json"});
  EXPECT_EQ(trace.status, 0) << trace.error;
  EXPECT_THAT(trace.out, HasSubstr("rank wait"));
  EXPECT_THAT(file_text(folder_ / "profile.html"), HasSubstr("rank wait"));
}

// Each writes what it has taken and received itself, also after it has gone on.
TEST_F(RanksTest, EachHaveMetrics) {
  expect_done(run_sluice(words("run", 3, 2, "--stage 2")));
  expect_done(run_sluice(words("run", 3, 4, "--stage 2 --resume")));
  const std::vector<Json> first = rows("run");
  for (const char* name : {"run", "run.rank1", "run.rank2"}) {
    const std::vector<Json> own = rows(name);
    ASSERT_EQ(own.size(), 4u) << name;
    for (std::size_t i = 0; i < own.size(); ++i) {
      for (const char* field : {"run", "step", "loss", "gradient_norm"})
        EXPECT_EQ(own[i].at(field), first[i].at(field)) << name << " " << field;
      EXPECT_LE(own[i].at("peak_memory"), own[i].at("predicted_peak")) << name;
      EXPECT_GT(own[i].at("received"), 0) << name;
    }
  }
  EXPECT_NE(rows("run.rank1"), first);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run.rank3.jsonl"));
}

TEST_F(RanksTest, ThatCannotBeAreRefused) {
  const auto expect_refused = [&](int ranks, const std::string& flags, const std::string& part) {
    const Outcome outcome = run_sluice(words("refused", ranks, 3, flags));
    EXPECT_EQ(outcome.status, 2) << outcome.error;
    EXPECT_THAT(outcome.error, HasSubstr(part));
    EXPECT_FALSE(std::filesystem::exists(folder_ / "refused"));
  };
  expect_refused(5, "", "give a multiple of 5");
  expect_refused(2, "--stage 4", "stage 4");
  const Outcome small = run_sluice(words("small", 2, 3, "", "20MiB"));
  EXPECT_EQ(small.status, 3) << small.error;
  EXPECT_THAT(small.error, HasSubstr("does not fit in 20.0 MiB"));
}

std::vector<pid_t> children_of(pid_t process) {
  const std::string id = std::to_string(process);
  std::istringstream ids(file_text("/proc/" + id + "/task/" + id + "/children"));
  std::vector<pid_t> children;
  for (pid_t child; ids >> child;) children.push_back(child);
  return children;
}

// The state of a process: 'R', 'S', 'Z', ...; nothing where there is none.
std::optional<char> state_of(pid_t process) {
  const std::string stat = file_text("/proc/" + std::to_string(process) + "/stat");
  const std::size_t name_end = stat.rfind(')');
  return name_end == std::string::npos ? std::nullopt : std::optional(stat[name_end + 2]);
}

bool ends_within(pid_t process, std::chrono::seconds limit) {
  const auto until = steady_clock::now() + limit;
  while (state_of(process) && state_of(process) != 'Z') {
    if (steady_clock::now() > until) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

class LostRankTest : public RanksTest {
 protected:
  // A run of three ranks, some steps of which are done.
  std::unique_ptr<SluiceProcess> start(const std::string& flags = "") const {
    auto run = std::make_unique<SluiceProcess>(words("run", 3, 100000, "--stage 3 --save-every 2 " + flags));
    const auto until = steady_clock::now() + std::chrono::seconds(60);
    while (!std::filesystem::exists(folder_ / "run/step-00000002") && steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_EQ(children_of(run->pid()).size(), 2u) << run->error();
    return run;
  }
};

TEST_F(LostRankTest, IsNamedAndEndsTheRun) {
  const auto run = start();
  const std::vector<pid_t> others = children_of(run->pid());
  ASSERT_EQ(others.size(), 2u);
  ::kill(others[1], SIGKILL);
  ASSERT_TRUE(ends_within(run->pid(), std::chrono::seconds(20)));
  EXPECT_EQ(run->wait(), 1);
  EXPECT_THAT(run->error(), HasSubstr("rank 2"));
  EXPECT_FALSE(state_of(others[0]));
}

// Ranks write a checkpoint together, so the death of any of them in a save leaves a part of one.
TEST_F(LostRankTest, InASaveLeavesTheCheckpointBefore) {
  for (const std::size_t killed : {0, 1, 2}) {
    const std::string name = "killed" + std::to_string(killed);
    SluiceProcess run(words(name, 3, 100000, "--stage 2 --save-every 1"));
    const auto is_saving = [&] {
      std::error_code ignored;
      for (const auto& entry : std::filesystem::directory_iterator(folder_ / name, ignored))
        if (entry.path().filename().string().find(".partial-") != std::string::npos) return true;
      return false;
    };
    const auto until = steady_clock::now() + std::chrono::seconds(60);
    while (!std::filesystem::exists(folder_ / (name + "/step-00000001")) && steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const Outcome read = run_sluice({"inspect", folder_ / name});  // meanwhile
    EXPECT_EQ(read.status, 0) << read.error;
    const std::vector<pid_t> others = children_of(run.pid());
    ASSERT_EQ(others.size(), 2u) << run.error();
    while (!is_saving() && steady_clock::now() < until) continue;
    ::kill(killed == 0 ? run.pid() : others[killed - 1], SIGKILL);
    ASSERT_TRUE(ends_within(run.pid(), std::chrono::seconds(20)));
    for (const pid_t other : others) ASSERT_TRUE(ends_within(other, std::chrono::seconds(20)));
    EXPECT_THAT(run.error(), HasSubstr("rank " + std::to_string(killed)));
    const Outcome verified = run_sluice({"inspect", "--verify", folder_ / name});
    EXPECT_EQ(verified.status, 0) << verified.error << verified.out;
    std::string last;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / name))
      last = std::max(last, entry.path().filename().string());
    ASSERT_TRUE(last.starts_with("step-"));
    const int steps = std::stoi(last.substr(5)) + 1;
    const Outcome resumed = run_sluice(words(name, 2, steps, "--stage 3 --save-every 1 --resume"));
    EXPECT_EQ(resumed.status, 0) << resumed.error;
    EXPECT_FALSE(is_saving());  // what was left is removed
  }
}

TEST_F(LostRankTest, MayBeTheFirst) {
  const auto run = start();
  const std::vector<pid_t> others = children_of(run->pid());
  run->signal(SIGKILL);
  for (const pid_t other : others) EXPECT_TRUE(ends_within(other, std::chrono::seconds(20)));
  EXPECT_THAT(run->error(), HasSubstr("rank 0"));
}

TEST_F(LostRankTest, IsMissedWhenItIsSilent) {
  const auto run = start("--silence 1");
  const std::vector<pid_t> others = children_of(run->pid());
  ASSERT_EQ(others.size(), 2u);
  ::kill(others[0], SIGSTOP);
  ASSERT_TRUE(ends_within(others[1], std::chrono::seconds(20)));
  ASSERT_TRUE(ends_within(run->pid(), std::chrono::seconds(40)));
  EXPECT_EQ(run->wait(), 1);
  EXPECT_THAT(run->error(), HasSubstr("rank 1"));
  EXPECT_FALSE(state_of(others[0]));
}

TEST_F(LostRankTest, IsNoLossWhereTheRunIsAskedToStop) {
  const auto run = start();
  const std::vector<pid_t> others = children_of(run->pid());
  ASSERT_EQ(others.size(), 2u);
  ::kill(others[1], SIGTERM);
  ASSERT_TRUE(ends_within(run->pid(), std::chrono::seconds(30)));
  EXPECT_EQ(run->wait(), 0) << run->error();
  EXPECT_THAT(run->out(), HasSubstr("stopped by a signal to another rank"));
  EXPECT_THAT(run->out(), HasSubstr("go on with --resume"));
}

}  // namespace
}  // namespace sluice::cli
