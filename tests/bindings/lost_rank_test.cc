#include <signal.h>

#include "bindings/ranks_runs.h"
#include "testing.h"

// Runs of several ranks, one of which is killed, stands still, or is asked to stop.
namespace sluice::cli::lost_rank_test {

using std::chrono::steady_clock;

class LostRankTest : public RanksTest {
 protected:
  // A run of three ranks, some steps of which are done.
  std::unique_ptr<SluiceProcess> start(const std::string& flags = "") const {
    auto run = std::make_unique<SluiceProcess>(words("run", 3, 100000, "--stage 3 --save-every 2 " + flags));
    wait_for("run/step-00000002");
    EXPECT_EQ(children_of(run->pid()).size(), 2u) << run->error();
    return run;
  }
  void wait_for(const std::string& name) const {
    const auto until = steady_clock::now() + std::chrono::seconds(60);
    while (!std::filesystem::exists(folder_ / name) && steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
};

TEST_F(LostRankTest, IsNamedAndEndsTheRunAndAllOthersNameTheLastCheckpoint) {
  const auto run = start();
  wait_for("run/step-00000004");  // so that all ranks know of the first one
  const std::vector<pid_t> others = children_of(run->pid());
  ASSERT_EQ(others.size(), 2u);
  ::kill(others[1], SIGKILL);
  ASSERT_TRUE(ends_within(run->pid(), std::chrono::seconds(20)));
  EXPECT_EQ(run->wait(), 1);
  EXPECT_THAT(run->error(), HasSubstr("rank 2"));
  EXPECT_FALSE(state_of(others[0]));
  std::istringstream lines(run->error());
  int named = 0;
  for (std::string line; std::getline(lines, line);)
    named +=
        line.find("the last checkpoint stands: '" + (folder_ / "run/step-")) == std::string::npos ? 0 : 1;
  EXPECT_EQ(named, 2) << run->error();
}

// It stands still, and has to end with the others.
TEST_F(LostRankTest, IsNamedWithItsStageOfAPipeline) {
  SluiceProcess run(words("run", 3, 100000, "--mesh pipeline=3 --save-every 2 --silence 2"));
  wait_for("run/step-00000004");  // so that all ranks know of the first one
  const std::vector<pid_t> others = children_of(run.pid());
  ASSERT_EQ(others.size(), 2u) << run.error();
  ::kill(others[0], SIGSTOP);
  ASSERT_TRUE(ends_within(run.pid(), std::chrono::seconds(20)));
  EXPECT_EQ(run.wait(), 1);
  EXPECT_THAT(run.error(), ::testing::ContainsRegex(
                               "rank 1 \\(pipeline stage 2 of 3\\) has .*; the last checkpoint stands: "));
  EXPECT_FALSE(state_of(others[0]));
  succeed({"inspect", "--verify", folder_ / "run"});
}

TEST_F(LostRankTest, IsNamedWithItsStageBeforeTheFirstStep) {
  for (const std::string mesh : {"pipeline=3", "auto"}) {
    // One micro-batch, so that there is nothing to share out along data.
    SluiceProcess run(words(mesh, 3, 100000, "--accumulate 1 --mesh " + mesh));
    if (mesh == "auto") wait_for(mesh);  // so that it is chosen
    std::vector<pid_t> others;
    for (const auto until = steady_clock::now() + std::chrono::seconds(60);
         others.size() < 2 && steady_clock::now() < until;)
      others = children_of(run.pid());
    ASSERT_EQ(others.size(), 2u) << run.error();
    ::kill(others[0], SIGKILL);
    ASSERT_TRUE(ends_within(run.pid(), std::chrono::seconds(20)));
    EXPECT_EQ(run.wait(), 1);
    EXPECT_THAT(run.error(), ::testing::ContainsRegex("rank 1 \\(pipeline stage .*\\) is gone"));
    if (mesh == "auto") continue;
    EXPECT_THAT(run.error(), Not(HasSubstr("step 1"))) << "it was killed too late";
  }
}

// It stands still before it is killed, so that the others wait for what is on its disk.
TEST_F(LostRankTest, IsNamedByThoseThatWaitForItsDisk) {
  const auto run = start(on_disk());
  const std::vector<pid_t> others = children_of(run->pid());
  ASSERT_EQ(others.size(), 2u);
  ::kill(others[0], SIGSTOP);
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  ::kill(others[0], SIGKILL);
  ASSERT_TRUE(ends_within(run->pid(), std::chrono::seconds(20)));
  EXPECT_EQ(run->wait(), 1);
  EXPECT_THAT(run->error(), HasSubstr("rank 1"));
  EXPECT_FALSE(state_of(others[1]));
}

// Ranks write a checkpoint together, so the death of any of them in a save leaves a part of one.
TEST_F(LostRankTest, InASaveLeavesTheCheckpointBefore) {
  for (const std::size_t killed : {0, 2}) {
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
    succeed({"inspect", "--verify", folder_ / name});
    std::string last;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / name))
      last = std::max(last, entry.path().filename().string());
    ASSERT_TRUE(last.starts_with("step-"));
    const int steps = std::stoi(last.substr(5)) + 1;
    succeed(words(name, 2, steps, "--stage 3 --save-every 1 --resume"));
    EXPECT_FALSE(is_saving());  // what was left is removed
  }
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

}  // namespace sluice::cli::lost_rank_test
