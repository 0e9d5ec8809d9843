#pragma once
#include <algorithm>
#include <chrono>

namespace sluice::comm {

// How long a thread that polls a link may sleep between two polls.
//
// After a packet has moved, the next one usually follows soon: the thread keeps polling for 50 us, and then
// sleeps for an eighth of the time since, 20 us to 1 ms. In a stream of large packets the link's bandwidth
// decides when each one arrives, and several more are in flight. Polling for every one would take time from
// compute threads and bring nothing earlier, so the thread then sleeps for the time that four of them take.
class Pace {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Pace(Clock::time_point now) : moved_(now), large_(now), begun_(now) {}

  void moved(Clock::time_point now) { moved_ = now; }

  void moved_large(Clock::time_point now) {
    moved_ = now;
    if (now > large_ + kPause) {
      begun_ = now;
      count_ = 0;
    } else if (++count_ == kMostCount) {  // forget old intervals, so that the pace follows the link
      begun_ += (now - begun_) / 2;
      count_ /= 2;
    }
    large_ = now;
  }

  // Returns zero where the thread should not sleep.
  Clock::duration sleep(Clock::time_point now) const {
    const Clock::duration stream = std::min<Clock::duration>(4 * between_large(now), kMostSleep);
    if (stream > kAwake) return stream;
    if (now < moved_ + kAwake) return Clock::duration::zero();
    return std::clamp<Clock::duration>((now - moved_) / 8, kLeastSleep, kMostSleep);
  }

 private:
  static constexpr std::chrono::microseconds kAwake{50}, kLeastSleep{20}, kMostSleep{1000};
  static constexpr std::chrono::milliseconds kPause{4};  // a stream ends without a large packet for so long
  static constexpr int kLeastCount = 8, kMostCount = 64;

  Clock::duration between_large(Clock::time_point now) const {
    if (count_ < kLeastCount || now > large_ + kPause) return Clock::duration::zero();
    return (large_ - begun_) / count_;
  }

  Clock::time_point moved_, large_;  // when the last packet, and the last large one, moved
  Clock::time_point begun_;          // when the first of `count_` large packets moved
  int count_ = 0;
};

}  // namespace sluice::comm
