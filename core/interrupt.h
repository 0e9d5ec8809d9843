#pragma once
#include <chrono>
#include <functional>

namespace sluice {

// While it lives, long work of the thread that made it (planning, taking memory) calls `look` from time to
// time, which may throw what ends the work. Thread rule: made and destroyed by one thread.
class Interruptible {
 public:
  explicit Interruptible(std::function<void()> look);
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

 private:
  friend void look_for_interrupt();
  const std::function<void()> look_;
  std::chrono::steady_clock::time_point next_;
  Interruptible* const before_;
};

// Calls the `look` of the thread's innermost Interruptible, if there is one, and throws what it throws. Its
// caller changes nothing, or holds nothing that an exception would leave behind.
void look_for_interrupt();

}  // namespace sluice
