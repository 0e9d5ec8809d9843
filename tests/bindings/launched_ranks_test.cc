#include <signal.h>

#include "bindings/ranks_runs.h"
#include "comm/under_mpirun.h"
#include "testing.h"

// Runs whose ranks mpirun has started.
namespace sluice::cli::launched_ranks_test {

using comm::MpirunProcess;
using std::chrono::steady_clock;

class LaunchedRanksTest : public RanksTest {
 protected:
  void SetUp() override {
    if (const std::string missing = comm::missing_for_mpi(); !missing.empty()) GTEST_SKIP() << missing;
  }
  static std::unique_ptr<MpirunProcess> launch(int ranks, std::vector<std::string> all) {
    all.insert(all.begin(), sluice_path());
    return std::make_unique<MpirunProcess>(ranks, all);
  }
  static int count(const std::string& text, const std::string& part) {
    int found = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
    return found;
  }

  // A run of three ranks, some steps of which are done. Their errors are in files, since mpirun may end
  // before it has handed on what ranks write last.
  std::unique_ptr<MpirunProcess> start(const std::string& flags = "") const {
    std::vector<std::string> program{"sh", "-c", R"(exec "$@" 2> "$0.$OMPI_COMM_WORLD_RANK")",
                                     folder_ / "error", sluice_path()};
    const std::vector<std::string> own = words("run", 0, 100000, "--stage 2 --save-every 1000 " + flags);
    program.insert(program.end(), own.begin(), own.end());
    auto run = std::make_unique<MpirunProcess>(3, program);
    const auto until = steady_clock::now() + std::chrono::seconds(60);
    while (losses("run").size() < 3 && steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_GE(losses("run").size(), 3u) << run->output();
    return run;
  }
  std::string error_of(int rank) const { return file_text(folder_ / ("error." + std::to_string(rank))); }
  // The process that is that rank of mpirun's.
  static pid_t process_of(const MpirunProcess& run, int rank) {
    const std::string own = "OMPI_COMM_WORLD_RANK=" + std::to_string(rank);
    for (const pid_t child : children_of(run.pid())) {
      std::istringstream variables(file_text("/proc/" + std::to_string(child) + "/environ"));
      for (std::string variable; std::getline(variables, variable, '\0');)
        if (variable == own) return child;
    }
    ADD_FAILURE() << "mpirun has no rank " << rank;
    return -1;
  }
};

TEST_F(LaunchedRanksTest, HaveTheBitsOfRanksThatTheFirstOneStarts) {
  succeed(words("own", 3, 3, "--stage 3"));
  const auto run = launch(3, words("launched", 0, 3, "--stage 3"));
  ASSERT_EQ(run->wait(), 0) << run->output();
  EXPECT_EQ(losses("launched").size(), 3u);
  EXPECT_EQ(losses("launched"), losses("own"));
  EXPECT_TRUE(tensors("launched", 3) == tensors("own", 3));
  EXPECT_EQ(count(run->output(), "3 steps done"), 1) << "rank 0 alone tells\n" << run->output();
  EXPECT_THAT(run->output(), HasSubstr("this is rank 0 of 3"));
  EXPECT_THAT(run->output(), Not(HasSubstr("warning")));
}

TEST_F(LaunchedRanksTest, ChooseTheirMesh) {
  const auto run = launch(2, words("chosen", 0, 2, "--mesh auto"));
  ASSERT_EQ(run->wait(), 0) << run->output();
  EXPECT_THAT(run->output(), HasSubstr(", of 4 that were compared:"));
}

TEST_F(LaunchedRanksTest, AreAsManyAsTheLauncherSays) {
  const auto other = launch(2, words("other", 3, 3));
  EXPECT_EQ(other->wait(), 2);
  EXPECT_THAT(other->output(), HasSubstr("mpirun has started 2 ranks"));
  const auto same = launch(2, words("same", 2, 3, "--log-level debug"));
  EXPECT_EQ(same->wait(), 0) << same->output();
  EXPECT_THAT(same->output(), HasSubstr("sluice: debug: this is rank 0 of 2"));
  EXPECT_THAT(same->output(), HasSubstr("sluice: rank 1: debug: this is rank 1 of 2"));
}

// With variables of another launcher than the MPI library knows, each process would believe that it is alone.
TEST_F(LaunchedRanksTest, AreThoseThatMpiFinds) {
  const Variable rank("PMI_RANK", "0"), ranks("PMI_SIZE", "2");
  expect_refusal(words("found", 0, 3), 2, {"mpiexec has started 2 ranks, of which MPI finds 1"});
}

TEST_F(LaunchedRanksTest, TrainAloneWhereTheyAreAskedTo) {
  const auto run = launch(2, without(without(words("alone", 1, 3), "--out"), "--metrics"));
  EXPECT_EQ(run->wait(), 0) << run->output();
  EXPECT_EQ(count(run->output(), "3 steps done"), 2) << run->output();
  const auto single = launch(1, words("single", 0, 3));
  EXPECT_EQ(single->wait(), 0) << single->output();
  EXPECT_THAT(single->output(), Not(HasSubstr("this is rank 0")));
  const auto local = launch(1, words("local", 2, 3));
  EXPECT_EQ(local->wait(), 0) << local->output();
  EXPECT_THAT(local->output(), HasSubstr("this is rank 0 of 2"));
}

TEST_F(LaunchedRanksTest, NameTheOneThatIsKilled) {
  const auto run = start();
  ::kill(process_of(*run, 1), SIGKILL);
  EXPECT_NE(run->wait(), 0);
  EXPECT_THAT(error_of(0), HasSubstr("sluice: error: "));
  EXPECT_THAT(error_of(2), HasSubstr("sluice: rank 2: error: "));
  for (const int rank : {0, 2})
    EXPECT_THAT(error_of(rank), HasSubstr("rank 1 is gone: its process has ended"));
  for (const char* name : {"run", "run.rank1", "run.rank2"}) EXPECT_GE(losses(name).size(), 2u) << name;
}

TEST_F(LaunchedRanksTest, NameTheOneThatIsSilent) {
  const auto run = start("--silence 1");
  const pid_t stopped = process_of(*run, 2);
  ::kill(stopped, SIGSTOP);
  EXPECT_NE(run->wait(), 0);
  EXPECT_THAT(error_of(0), HasSubstr("sluice: error: "));
  EXPECT_THAT(error_of(0), HasSubstr("rank 2 has given no sign of life"));
  EXPECT_TRUE(ends_within(stopped, std::chrono::seconds(20))) << "it is left behind";
}

// mpirun hands this signal on, and kills nobody for it.
TEST_F(LaunchedRanksTest, SaveWhenTheyAreAskedToStop) {
  const auto run = start();
  ::kill(run->pid(), SIGUSR1);
  EXPECT_EQ(run->wait(), 0) << run->output();
  EXPECT_THAT(run->output(), HasSubstr("stopped by SIGUSR1: saved after step"));
}

TEST(Launcher, NeedsThePluginOfMpi) {
  const TemporaryFolder folder;
  const std::filesystem::path library =
      std::filesystem::path(sluice_path()).parent_path() / ".." / "lib" / "libsluice.so";
  std::filesystem::copy_file(library, folder / "libsluice.so");
  const Variable found_first("LD_LIBRARY_PATH", folder.path().c_str());
  const Variable rank("OMPI_COMM_WORLD_RANK", "1"), ranks("OMPI_COMM_WORLD_SIZE", "2");
  expect_refusal({"train", "--model", "tiny", "--data", "x.txt"}, 2,
                 {"mpirun has started this process as rank 1 of several", "openmpi-bin"});
}

}  // namespace sluice::cli::launched_ranks_test
