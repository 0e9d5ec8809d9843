#pragma once
#include <chrono>
#include <string>
#include <utility>

#include "core/trace.h"

namespace sluice::engine {

// Measures how long the engine's caller waited for reads and for writes, and shows each wait in the trace.
// Thread rule: one thread at a time.
class Waits {
 public:
  enum class For { kReads, kWrites };
  explicit Waits(Trace* trace) : trace_(trace) {}

  template <class Wait>
  void during(For what, const std::string& name, Wait&& wait) {
    const auto begin = Trace::Clock::now();
    std::forward<Wait>(wait)();
    const auto end = Trace::Clock::now();
    (what == For::kReads ? read_seconds_ : write_seconds_) +=
        std::chrono::duration<double>(end - begin).count();
    if (trace_ == nullptr || end - begin < kShortest) return;
    trace_->add(what == For::kReads ? Trace::Lane::kReadWait : Trace::Lane::kWriteWait, name, begin, end);
  }
  double read_seconds() const { return read_seconds_; }
  double write_seconds() const { return write_seconds_; }

 private:
  // Shorter waits are counted, and left out of the trace.
  static constexpr std::chrono::microseconds kShortest{20};
  Trace* trace_;
  double read_seconds_ = 0, write_seconds_ = 0;
};

}  // namespace sluice::engine
