#pragma once
#include <signal.h>
#include <sys/types.h>

#include <atomic>
#include <thread>
#include <vector>

namespace sluice::cli {

// While it lives, SIGTERM, SIGUSR1 and the first Ctrl-C request a stop. Before begin_steps() they end the
// process within a second, with status 0, since planning and loading have nothing to save. After it they
// request a stop at the end of the step. A Ctrl-C after any of them ends the process at once, with status
// 130. REQUIRES: it is made before the compute threads.
//
// A thread of its own waits for the signals, and all later threads block them, so that no handler runs. A
// handler would run on the stack of a compute thread, where generated code of oneDNN uses the stack pointer
// for other purposes, so that the kernel would overwrite other memory below it.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // For the ranks of a run, which stop together. Rank 0 names the processes that it kills where a signal ends
  // it before the run's own end, and each other rank the process of rank 0, its parent, to which it passes a
  // request from before its begin_steps().
  static void end_with_this(const std::vector<pid_t>& processes);
  static void pass_on_to(pid_t process);

  // From now on the computing code polls requested().
  static void begin_steps();
  static bool requested();
  static bool requested_by(int signal);
  static const char* name();  // "SIGTERM", "SIGUSR1", "Ctrl-C", or "" where none came

 private:
  sigset_t before_ = {};
  std::atomic<bool> ended_{false};
  std::thread waiting_;
};

}  // namespace sluice::cli
