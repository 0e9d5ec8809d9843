#pragma once
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iterator>

#include "temporary_folder.h"
#include "testing.h"
#include "variable.h"

namespace sluice::cli {

inline std::string file_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

// Returns the program that was built beside this test.
inline std::string sluice_path() {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path() / "sluice").string();
}

// Runs `sluice` as a process, with its output in files.
class SluiceProcess {
 public:
  explicit SluiceProcess(const std::vector<std::string>& words, const std::string& program = sluice_path()) {
    std::vector<std::string> all = {program};
    all.insert(all.end(), words.begin(), words.end());
    std::vector<char*> argv;
    for (std::string& word : all) argv.push_back(word.data());
    argv.push_back(nullptr);
    const std::string out = folder_ / "out", error = folder_ / "err";
    pid_ = ::fork();
    if (pid_ != 0) return;
    redirect(out, STDOUT_FILENO);
    redirect(error, STDERR_FILENO);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  ~SluiceProcess() {
    if (status_ < 0) {
      ::kill(pid_, SIGKILL);
      wait();
    }
  }
  SluiceProcess(const SluiceProcess&) = delete;
  SluiceProcess& operator=(const SluiceProcess&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const { ::kill(pid_, number); }
  // Returns the exit status, or 1000 + the signal that ended the process.
  int wait() {
    int raw = 0;
    if (status_ < 0 && ::waitpid(pid_, &raw, 0) == pid_)
      status_ = WIFEXITED(raw) ? WEXITSTATUS(raw) : 1000 + WTERMSIG(raw);
    return status_;
  }
  std::string out() const { return file_text(folder_ / "out"); }
  std::string error() const { return file_text(folder_ / "err"); }

 private:
  // This runs between fork and exec, so it must not use stdio, whose buffers belong to the parent.
  static void redirect(const std::string& path, int descriptor) {
    const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (file < 0 || ::dup2(file, descriptor) < 0) ::_exit(126);
  }

  TemporaryFolder folder_;
  pid_t pid_ = -1;
  int status_ = -1;
};

struct Outcome {
  int status;
  std::string out, error;
};
inline Outcome run_sluice(const std::vector<std::string>& words) {
  SluiceProcess process(words);
  const int status = process.wait();
  return {status, process.out(), process.error()};
}

inline void expect_done(const Outcome& outcome) {
  EXPECT_EQ(outcome.status, 0) << outcome.error << outcome.out;
}
// Runs `sluice`, which must succeed. Returns what it printed.
inline std::string succeed(const std::vector<std::string>& words) {
  const Outcome outcome = run_sluice(words);
  expect_done(outcome);
  return outcome.out;
}
// Runs `sluice`, which must end with this status and an error with these parts.
inline void expect_refusal(const std::vector<std::string>& words, int status,
                           const std::vector<std::string>& parts) {
  const Outcome outcome = run_sluice(words);
  EXPECT_EQ(outcome.status, status) << outcome.error << outcome.out;
  for (const std::string& part : parts) EXPECT_THAT(outcome.error, HasSubstr(part));
}

// The words of a line, which are apart by spaces.
inline std::vector<std::string> words_of(const std::string& line) {
  std::istringstream stream(line);
  return {std::istream_iterator<std::string>(stream), {}};
}

// The words with these flags, each of which takes the place of the same one before.
inline std::vector<std::string> with_flags(std::vector<std::string> all,
                                           const std::vector<std::string>& flags) {
  for (const std::string& word : flags) {
    const auto known = std::ranges::find(all, word);
    if (word.starts_with("--") && known != all.end()) all.erase(known, known + 2);
  }
  all.insert(all.end(), flags.begin(), flags.end());
  return all;
}
inline std::vector<std::string> without(std::vector<std::string> all, const std::string& flag) {
  const auto given = std::ranges::find(all, flag);
  all.erase(given, given + 2);
  return all;
}

// Makes a text with regularities that a model can learn.
inline std::string lesson() {
  std::string text;
  for (int i = 0; text.size() < 30000; ++i)
    text += "the river runs to the sea, and the sea to the " + std::to_string(i * 7919 % 1000) + " winds. ";
  return text;
}

// Returns the words that train the smallest model on that text into that folder, with more flags.
inline std::vector<std::string> tiny_training(const std::string& text, const std::string& out, int steps,
                                              const std::vector<std::vector<std::string>>& more) {
  std::vector<std::string> all =
      words_of("train --model tiny --memory 600MiB --seq 32 --batch 2 --schedule constant --lr 1e-3");
  for (const std::string& word : {std::string("--data"), text, std::string("--out"), out,
                                  std::string("--steps"), std::to_string(steps)})
    all.push_back(word);
  for (const std::vector<std::string>& flags : more) all = with_flags(all, flags);
  return all;
}

}  // namespace sluice::cli
