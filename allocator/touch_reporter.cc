#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "allocator/memory.h"
#include "allocator/range_registry.h"
#include "core/error.h"

namespace sluice::allocator {
namespace {

// The previously installed handler, which gets all faults outside of the allocator's ranges.
std::atomic<const struct sigaction*> handler_before{nullptr};
// The thread whose fault was passed on last. Another handler may have been installed over this one that
// reports a fault and raises the signal again; the two would call each other for ever.
std::atomic<pid_t> passed_on_by{0};

// Formats and writes a message with async-signal-safe functions only.
class Message {
 public:
  void add(const char* text) {
    const std::size_t room = sizeof text_ - size_;
    const std::size_t length = std::strlen(text) < room ? std::strlen(text) : room;
    std::memcpy(text_ + size_, text, length);
    size_ += length;
  }
  void write() const {
    for (std::size_t done = 0; done < size_;) {
      const ssize_t n = ::write(STDERR_FILENO, text_ + done, size_ - done);
      if (n <= 0) return;
      done += static_cast<std::size_t>(n);
    }
  }

 private:
  char text_[768];
  std::size_t size_ = 0;
};

// `reason` says why the touch server could not bring the memory in; null without a server.
void describe(const RegisteredRange& range, std::uintptr_t address, const char* reason, Message& message) {
  message.add("sluice: the memory of '");
  message.add(range.name);
  if (range.owner.load() != ::getpid())
    message.add(
        "' was touched in a forked child, which has none of it; train in the parent, or start the child with "
        "exec (Python: the 'spawn' start method)\n");
  else if (address - range.begin.load() >= range.used.load())
    message.add("' was accessed beyond its end\n");
  else if (range.kind.load() == RangeKind::kFormerHome)
    message.add(
        "' was touched after its engine was closed without keeping the values; copy them before closing\n");
  else if (reason == nullptr)
    message.add("' was touched while absent; acquire its unit first (for editing, to write it)\n");
  else {
    message.add("' was touched while absent, and cannot be brought in: ");
    message.add(reason);
    message.add("\n");
  }
}

void pass_on(int number, siginfo_t* info, void* context) {
  const struct sigaction& before = *handler_before.load();
  const bool raised = info->si_code <= 0;
  if (!(raised && passed_on_by == ::gettid())) {
    passed_on_by = ::gettid();
    const bool wants_info = (before.sa_flags & SA_SIGINFO) != 0;
    if (wants_info && before.sa_sigaction != nullptr) return before.sa_sigaction(number, info, context);
    if (!wants_info && before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
      return before.sa_handler(number);
  }
  ::signal(number, SIG_DFL);  // on return the instruction faults again, and ends the process
  if (raised) ::raise(number);
}

bool is_write([[maybe_unused]] const void* context) {
#if defined(__x86_64__)
  return (static_cast<const ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2) != 0;
#else
  return true;
#endif
}

// Returns whether the range's service brought the memory in. If it refused, *reason is set.
bool is_served(const RegisteredRange& range, std::uintptr_t address, bool write, const char** reason) {
  TouchService* service = range.service.load();
  if (service == nullptr || range.owner.load() != ::getpid() ||
      address - range.begin.load() >= range.used.load())
    return false;
  const int error = errno;
  *reason = service->bring_in(address, write);
  errno = error;
  return *reason == nullptr;
}

void on_fault(int number, siginfo_t* info, void* context) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  const RegisteredRange* range = info->si_code > 0 ? find_range(address) : nullptr;
  if (range == nullptr) return pass_on(number, info, context);
  const char* reason = nullptr;
  if (is_served(*range, address, is_write(context), &reason)) return;  // the access is repeated, and succeeds
  Message message;
  describe(*range, address, reason, message);
  message.write();
  std::abort();
}

bool is_installed(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == on_fault;
}

}  // namespace

void install_touch_reporter() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  struct sigaction now = {};
  if (::sigaction(SIGSEGV, nullptr, &now) == 0 && is_installed(now)) return;
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  ::sigemptyset(&action.sa_mask);
  handler_before = new struct sigaction(now);  // never freed: a signal handler may be reading the old one
  if (::sigaction(SIGSEGV, &action, nullptr) != 0)
    fail(ErrorCode::kIo, "cannot report touches of absent parameters: {}", errno_text(errno));
}

}  // namespace sluice::allocator
