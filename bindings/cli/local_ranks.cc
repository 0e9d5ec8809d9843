#include "bindings/cli/local_ranks.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "bindings/cli/signals.h"
#include "core/error.h"
#include "core/text_file.h"

namespace sluice::cli {
namespace {

// Set for ranks that rank 0 starts: their number, and the process id of rank 0.
constexpr const char *kRankName = "SLUICE_RANK", *kFirstName = "SLUICE_RANK_0_PROCESS";
constexpr int kMemoryDescriptor = 3;  // their descriptor of the shared memory

std::vector<std::string> own_words() {
  std::vector<std::string> words(1);
  for (const char c : read_text_file("/proc/self/cmdline")) {
    if (c == '\0')
      words.emplace_back();
    else
      words.back() += c;
  }
  words.pop_back();
  return words;
}

std::vector<char*> pointers_to(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  return pointers;
}

std::vector<std::string> environment_of(int rank) {
  const std::string own = std::string(kRankName) + "=", first = std::string(kFirstName) + "=";
  std::vector<std::string> variables;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view text = *variable;
    if (!text.starts_with(own) && !text.starts_with(first)) variables.emplace_back(text);
  }
  variables.push_back(own + std::to_string(rank));
  variables.push_back(first + std::to_string(::getpid()));
  return variables;
}

// Returns whether this process's parent is its rank 0, and no other that it has got since that ended.
bool parent_is_rank_0() {
  const char* const first = std::getenv(kFirstName);
  return first != nullptr && first == std::to_string(::getppid());
}

pid_t start(int rank, int memory) {
  posix_spawn_file_actions_t files;
  ::posix_spawn_file_actions_init(&files);
  // dup2() also clears close-on-exec where both numbers are the same.
  ::posix_spawn_file_actions_adddup2(&files, memory, kMemoryDescriptor);
  ::posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  ::posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  std::vector<std::string> words = own_words(), variables = environment_of(rank);
  // It inherits that the stop signals are blocked, so that one that comes early waits for its StopSignals.
  pid_t process = 0;
  const int error = ::posix_spawn(&process, "/proc/self/exe", &files, nullptr, pointers_to(words).data(),
                                  pointers_to(variables).data());
  ::posix_spawn_file_actions_destroy(&files);
  if (error != 0) fail(ErrorCode::kIo, "rank {} could not be started: {}", rank, errno_text(error));
  return process;
}

// Waits for a process to end, and kills it if it does not.
void wait_for(pid_t process) {
  constexpr auto kPatience = std::chrono::seconds(2);
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (::waitpid(process, nullptr, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > until) ::kill(process, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace

int LocalRanks::own_rank() {
  static const int rank = [] {
    const char* const given = std::getenv(kRankName);
    return given == nullptr ? 0 : std::max(0, std::atoi(given));  // NOLINT: the constructor checks it
  }();
  return rank;
}

LocalRanks::LocalRanks(int ranks, const comm::Deadlines& deadlines) {
  const int rank = own_rank();
  if (rank > 0) {
    memory_ = std::make_unique<comm::LocalMemory>(kMemoryDescriptor);
    if (rank >= ranks || memory_->ranks() != ranks)
      fail(ErrorCode::kInvalidArgument, "{} is {}, which is set by the rank 0 of a run alone; unset it",
           kRankName, rank);
    if (parent_is_rank_0()) StopSignals::pass_on_to(::getppid());
  } else {
    memory_ = std::make_unique<comm::LocalMemory>(ranks, kRing);
    start_others(ranks);
    StopSignals::end_with_this(started_);
  }
  communicator_.emplace(comm::make_local_links(*memory_, rank), deadlines.of_ranks_started_together(),
                        ledger_);
  if (rank == 0) watch_ = std::jthread([this](const std::stop_token& end) { watch(end); });
}

void LocalRanks::start_others(int ranks) {
  try {
    for (int rank = 1; rank < ranks; ++rank) started_.push_back(start(rank, memory_->descriptor()));
  } catch (...) {
    for (const pid_t process : started_) {
      ::kill(process, SIGKILL);
      wait_for(process);
    }
    throw;
  }
}

void LocalRanks::watch(const std::stop_token& end) {
  constexpr auto kBetween = std::chrono::milliseconds(50);
  for (; !end.stop_requested(); std::this_thread::sleep_for(kBetween))
    for (std::size_t i = 0; i < started_.size(); ++i) {
      siginfo_t ended = {};
      const bool known =
          ::waitid(P_PID, static_cast<id_t>(started_[i]), &ended, WEXITED | WNOHANG | WNOWAIT) == 0;
      if (known && ended.si_pid != 0) memory_->leave(static_cast<int>(i) + 1, false);
    }
}

LocalRanks::~LocalRanks() {
  if (watch_.joinable()) {
    watch_.request_stop();
    watch_.join();
  }
  communicator_.reset();
  StopSignals::end_with_this({});
  for (const pid_t process : started_) wait_for(process);
}

// A rank maps the rings to and from each other rank.
std::uint64_t LocalRanks::bytes(int ranks) {
  return comm::Communicator::buffer_bytes(ranks) +
         comm::LocalMemory::bytes(ranks, kRing) * 2 / static_cast<std::size_t>(ranks);
}

}  // namespace sluice::cli
