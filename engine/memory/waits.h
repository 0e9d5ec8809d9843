#pragma once
#include <array>
#include <chrono>
#include <string>
#include <utility>

#include "core/trace.h"

namespace sluice::engine {

// Measures how long the engine's caller waits for reads, for writes and for other ranks, and records each
// wait in the trace. Thread rule: one thread at a time.
class Waits {
 public:
  enum class For { kReads, kWrites, kRanks };
  explicit Waits(Trace* trace) : trace_(trace) {}

  template <class Wait>
  void during(For what, const std::string& name, Wait&& wait) {
    const auto begin = Trace::Clock::now();
    std::forward<Wait>(wait)();
    const auto end = Trace::Clock::now();
    seconds_[static_cast<std::size_t>(what)] += std::chrono::duration<double>(end - begin).count();
    if (trace_ == nullptr || end - begin < kShortest) return;
    constexpr std::array kLanes = {Trace::Lane::kReadWait, Trace::Lane::kWriteWait, Trace::Lane::kRankWait};
    trace_->add(kLanes[static_cast<std::size_t>(what)], name, begin, end);
  }
  double read_seconds() const { return seconds_[0]; }
  double write_seconds() const { return seconds_[1]; }
  double rank_seconds() const { return seconds_[2]; }

 private:
  // Shorter waits are counted but not traced.
  static constexpr std::chrono::microseconds kShortest{20};
  Trace* trace_;
  std::array<double, 3> seconds_ = {};  // by For
};

}  // namespace sluice::engine
