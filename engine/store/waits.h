#pragma once
#include <chrono>
#include <string>
#include <utility>

#include "core/trace.h"

namespace sluice::engine {

// How long the caller of the engine waited for transfers, of which kind, and in the trace when and for what.
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
  static constexpr std::chrono::microseconds kShortest{20};  // in the trace; counted are all
  Trace* trace_;
  double read_seconds_ = 0, write_seconds_ = 0;
};

}  // namespace sluice::engine
