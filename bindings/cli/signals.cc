#include "bindings/cli/signals.h"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>

namespace sluice::cli {
namespace {

constexpr std::array kSignals = {SIGINT, SIGTERM, SIGUSR1};
std::atomic<int> received{0};  // a handler runs on any thread
static_assert(std::atomic<int>::is_always_lock_free);
std::array<struct sigaction, kSignals.size()> previous;

void on_signal(int number) {
  int none = 0;
  if (received.compare_exchange_strong(none, number) || number != SIGINT) return;
  static constexpr char kText[] = "\nsluice: stopped at once; what was saved before stands\n";
  (void)!::write(STDERR_FILENO, kText, sizeof kText - 1);
  ::_exit(128 + SIGINT);
}

}  // namespace

StopSignals::StopSignals() {
  received = 0;
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &action, &previous[i]);
}

StopSignals::~StopSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &previous[i], nullptr);
}

bool StopSignals::requested() { return received != 0; }

const char* StopSignals::name() {
  switch (received) {
    case SIGINT:
      return "Ctrl-C";
    case SIGTERM:
      return "SIGTERM";
    case SIGUSR1:
      return "SIGUSR1";
    default:
      return "";
  }
}

}  // namespace sluice::cli
