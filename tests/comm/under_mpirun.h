#pragma once
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/testing.h"

// Tests whose ranks mpirun starts.
namespace sluice::comm {

inline std::string own_program() { return std::filesystem::read_symlink("/proc/self/exe").string(); }

// Returns what tests of MPI lack here, or nothing.
inline std::string missing_for_mpi() {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  return "the sanitizers do not know what Open MPI, which is built without them, does with memory and "
         "threads";
#endif
  const auto plugin = std::filesystem::path(own_program()).parent_path() / ".." / "lib" / "libsluice_mpi.so";
  if (!std::filesystem::exists(plugin)) return "Sluice was built without MPI (Debian: libopenmpi-dev)";
  std::istringstream folders(std::getenv("PATH"));
  for (std::string folder; std::getline(folders, folder, ':');)
    if (::access((folder + "/mpirun").c_str(), X_OK) == 0) return {};
  return "mpirun is missing (Debian: openmpi-bin)";
}

// A program under mpirun. Its output, and mpirun's, is in a file.
class MpirunProcess {
 public:
  MpirunProcess(int ranks, const std::vector<std::string>& program,
                const std::vector<std::string>& flags = {}) {
    std::vector<std::string> words{"mpirun", "--oversubscribe", "--bind-to", "none"};
    words.insert(words.end(), flags.begin(), flags.end());
    words.insert(words.end(), {"-n", std::to_string(ranks)});
    words.insert(words.end(), program.begin(), program.end());
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    std::string pattern = (std::filesystem::temp_directory_path() / "sluice-mpirun-XXXXXX").string();
    const int file = ::mkostemp(pattern.data(), O_CLOEXEC);
    output_ = pattern;
    pid_ = ::fork();
    if (pid_ != 0) {
      ::close(file);
      return;
    }
    // In a container, tests run as root.
    ::setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
    ::setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
    // A test among its words is run, whatever share of the tests this process has.
    ::unsetenv("GTEST_TOTAL_SHARDS");
    ::unsetenv("GTEST_SHARD_INDEX");
    if (file < 0 || ::dup2(file, STDOUT_FILENO) < 0 || ::dup2(file, STDERR_FILENO) < 0) ::_exit(126);
    ::execvp(pointers[0], pointers.data());
    ::_exit(127);
  }
  ~MpirunProcess() {
    if (status_ < 0) {
      ::kill(pid_, SIGTERM);  // it ends its processes
      wait();
    }
    std::error_code ignored;
    std::filesystem::remove(output_, ignored);
  }
  MpirunProcess(const MpirunProcess&) = delete;
  MpirunProcess& operator=(const MpirunProcess&) = delete;

  pid_t pid() const { return pid_; }
  // Returns the exit status, or 1000 + the signal that ended the process.
  int wait() {
    int raw = 0;
    if (status_ < 0 && ::waitpid(pid_, &raw, 0) == pid_)
      status_ = WIFEXITED(raw) ? WEXITSTATUS(raw) : 1000 + WTERMSIG(raw);
    return status_;
  }
  std::string output() const {
    std::ifstream file(output_, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }

 private:
  std::string output_;
  pid_t pid_ = -1;
  int status_ = -1;
};

// Runs the test that this process runs by so many ranks. Each has a watchdog.
inline void expect_success_under_mpirun(int ranks, const std::vector<std::string>& flags = {}) {
  const testing::TestInfo* const test = testing::UnitTest::GetInstance()->current_test_info();
  const std::string name = std::string(test->test_suite_name()) + "." + test->name();
  MpirunProcess process(ranks, {own_program(), "--gtest_filter=" + name}, flags);
  EXPECT_EQ(process.wait(), 0) << process.output();
  // A rank that ran no test would have ended well, too.
  EXPECT_NE(process.output().find("1 test from 1 test suite ran"), std::string::npos) << process.output();
}

}  // namespace sluice::comm
