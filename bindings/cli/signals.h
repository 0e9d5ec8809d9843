#pragma once

namespace sluice::cli {

// While it lives, SIGTERM, SIGUSR1 and the first Ctrl-C ask for a stop at the end of the step; a Ctrl-C after
// any of them ends the process at once, with status 130. The handlers of before are put back at the end. One
// at a time in a process.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  static bool requested();
  static const char* name();  // "SIGTERM", "SIGUSR1", "Ctrl-C", or "" where none came
};

}  // namespace sluice::cli
