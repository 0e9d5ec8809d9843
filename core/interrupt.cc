#include "core/interrupt.h"

#include <utility>

namespace sluice {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks{50};
thread_local Interruptible* innermost = nullptr;

}  // namespace

Interruptible::Interruptible(std::function<void()> look)
    : look_(std::move(look)), before_(std::exchange(innermost, this)) {}
Interruptible::~Interruptible() { innermost = before_; }

void look_for_interrupt() {
  if (innermost == nullptr) return;
  const auto now = std::chrono::steady_clock::now();
  if (now < innermost->next_) return;
  innermost->next_ = now + kBetweenLooks;
  innermost->look_();
}

}  // namespace sluice
