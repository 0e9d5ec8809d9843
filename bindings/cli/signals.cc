#include "bindings/cli/signals.h"

#include <fmt/format.h>
#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <string>

namespace sluice::cli {
namespace {

std::atomic<int> received{0};
std::atomic<bool> in_steps{false};
std::atomic<pid_t> rank_0{0};  // the process that this one passes requests on to, or 0
std::mutex guard;
std::vector<pid_t> others;  // guarded: the processes that end with this one

sigset_t stop_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int number : {SIGINT, SIGTERM, SIGUSR1}) sigaddset(&set, number);
  struct sigaction hangup = {};
  ::sigaction(SIGHUP, nullptr, &hangup);
  if (hangup.sa_handler != SIG_IGN) sigaddset(&set, SIGHUP);  // nohup ignores it, so that the run goes on
  return set;
}

void kill_others() {
  const std::lock_guard lock(guard);
  for (const pid_t process : others) ::kill(process, SIGKILL);
}

void stop_at_once() {
  static constexpr char kText[] = "\nsluice: stopped at once; checkpoints that were saved before remain\n";
  (void)!::write(STDERR_FILENO, kText, sizeof kText - 1);
  kill_others();
  ::_exit(128 + SIGINT);
}

// Meanwhile the steps may begin, or the run may end by an error of its own: when a rank dies, a launcher
// sends SIGTERM to the others while they are about to report that.
void stop_before_steps(const std::atomic<bool>& ended) {
  constexpr auto kBetweenLooks = std::chrono::milliseconds(20);
  constexpr int kLooks = 25;
  for (int look = 0; look < kLooks; ++look) {
    if (in_steps || ended) return;
    if (const pid_t first = rank_0; first != 0) {
      if (::getppid() == first) ::kill(first, SIGTERM);
      return;
    }
    std::this_thread::sleep_for(kBetweenLooks);
  }
  const std::string text =
      fmt::format("sluice: stopped by {} before the first step; nothing was saved\n", StopSignals::name());
  (void)!::write(STDERR_FILENO, text.data(), text.size());
  kill_others();
  ::_exit(0);
}

}  // namespace

StopSignals::StopSignals() {
  received = 0;
  in_steps = false;
  const sigset_t set = stop_signals();
  ::pthread_sigmask(SIG_BLOCK, &set, &before_);
  waiting_ = std::thread([this, set] {
    for (int number = 0; ::sigwait(&set, &number) == 0 && !ended_;) {
      int none = 0;
      if (!received.compare_exchange_strong(none, number)) {
        if (number == SIGINT) stop_at_once();
      } else {
        stop_before_steps(ended_);
      }
    }
  });
}

StopSignals::~StopSignals() {
  ended_ = true;
  ::pthread_kill(waiting_.native_handle(), SIGUSR1);
  waiting_.join();
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
}

void StopSignals::pass_on_to(pid_t process) { rank_0 = process; }
void StopSignals::end_with_this(const std::vector<pid_t>& processes) {
  const std::lock_guard lock(guard);
  others = processes;
}

void StopSignals::begin_steps() { in_steps = true; }
bool StopSignals::requested() { return received != 0; }
bool StopSignals::requested_by(int signal) { return received == signal; }

const char* StopSignals::name() {
  switch (received) {
    case SIGINT:
      return "Ctrl-C";
    case SIGTERM:
      return "SIGTERM";
    case SIGUSR1:
      return "SIGUSR1";
    case SIGHUP:
      return "SIGHUP";
    default:
      return "";
  }
}

}  // namespace sluice::cli
