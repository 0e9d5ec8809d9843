#pragma once
#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

namespace sluice::allocator {

// Records the bytes held over time in a fixed amount of memory. Time is cut into equal intervals; when there
// are too many, neighbours are merged in pairs. Each interval keeps its largest and its last state, so no
// peak is lost, however long the run is. Thread rule: one thread at a time.
template <std::size_t kLines>
class Timeline {
 public:
  using Clock = std::chrono::steady_clock;
  using Held = std::array<std::uint64_t, kLines>;
  struct Part {
    Clock::time_point begin, end;
    Held most, last;
  };

  // Keeps at most `parts` intervals. REQUIRES: parts is at least 2.
  Timeline(std::size_t parts, Clock::time_point begin) : limit_(parts), begin_(begin) {
    parts_.reserve(parts);
  }

  // Records the bytes held from `now` on. REQUIRES: calls come in chronological order.
  void note(Clock::time_point now, const Held& held) {
    const auto index = [&] { return static_cast<std::uint64_t>((now - begin_) / width_); };
    while (index() >= limit_) join();
    if (parts_.empty() || parts_.back().index != index()) {
      // The state at the beginning of an interval counts for its peak, too.
      const Held before = parts_.empty() ? Held{} : parts_.back().last;
      parts_.push_back({index(), before, before});
    }
    Kept& part = parts_.back();
    part.last = held;
    if (sum(held) >= sum(part.most)) part.most = held;
  }

  // Returns the intervals in which something changed, in order.
  std::vector<Part> parts() const {
    std::vector<Part> result;
    for (const Kept& part : parts_) {
      const Clock::time_point begin = begin_ + width_ * static_cast<std::int64_t>(part.index);
      result.push_back({begin, begin + width_, part.most, part.last});
    }
    return result;
  }

 private:
  struct Kept {
    std::uint64_t index;
    Held most, last;
  };
  static std::uint64_t sum(const Held& held) {
    std::uint64_t all = 0;
    for (const std::uint64_t bytes : held) all += bytes;
    return all;
  }
  void join() {
    width_ *= 2;
    std::size_t count = 0;
    for (const Kept& part : parts_) {
      const std::uint64_t index = part.index / 2;
      if (count > 0 && parts_[count - 1].index == index) {
        Kept& joined = parts_[count - 1];
        joined.last = part.last;
        if (sum(part.most) >= sum(joined.most)) joined.most = part.most;
      } else {
        parts_[count++] = {index, part.most, part.last};
      }
    }
    parts_.resize(count);
  }

  std::size_t limit_;
  Clock::time_point begin_;
  Clock::duration width_ = std::chrono::milliseconds(1);
  std::vector<Kept> parts_;
};

}  // namespace sluice::allocator
