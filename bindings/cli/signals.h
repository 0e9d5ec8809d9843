#pragma once
#include <signal.h>

#include <atomic>
#include <thread>

namespace sluice::cli {

// While it lives, SIGTERM, SIGUSR1 and the first Ctrl-C ask for a stop. Before begin_steps() they end the
// process within a second, with status 0: planning and loading have changed nothing that would have to be
// saved. After it they ask for a stop at the end of the step. A Ctrl-C after any of them ends the process at
// once, with status 130. It is made before the threads that compute.
//
// A thread of its own waits for these signals, and all threads that begin later block them, so that no
// handler runs: it would run on the stack of a thread that computes, and generated code of oneDNN uses the
// stack pointer for other things, so that the system would overwrite other memory below it.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // From now on whoever computes looks at requested().
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
