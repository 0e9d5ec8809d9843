#include "comm/mpi/pace.h"

#include <gtest/gtest.h>

namespace sluice::comm {
namespace pace_test {

using namespace std::chrono_literals;

const Pace::Clock::time_point kBegin{1h};

// Large packets, one each `between`, the last one at the time that is returned.
Pace::Clock::time_point stream(Pace& pace, Pace::Clock::time_point from, Pace::Clock::duration between,
                               int packets) {
  for (int i = 0; i < packets; ++i) pace.moved_large(from += between);
  return from;
}

TEST(Pace, AfterALonePacketStaysAwakeAndThenSleepsLongerAndLonger) {
  Pace pace(kBegin);
  pace.moved(kBegin + 1s);
  EXPECT_EQ(pace.sleep(kBegin + 1s), 0us);
  EXPECT_EQ(pace.sleep(kBegin + 1s + 49us), 0us);
  EXPECT_EQ(pace.sleep(kBegin + 1s + 50us), 20us);
  EXPECT_EQ(pace.sleep(kBegin + 1s + 800us), 100us);
  EXPECT_EQ(pace.sleep(kBegin + 2s), 1ms);
}

TEST(Pace, WhileLargePacketsStreamSleepsForFourOfThem) {
  Pace pace(kBegin);
  const auto last = stream(pace, kBegin + 1s, 100us, 20);
  EXPECT_EQ(pace.sleep(last), 400us);
  EXPECT_EQ(pace.sleep(last + 300us), 400us);
}

TEST(Pace, OfASlowLinkSleepsNoLongerThanWithoutAStream) {
  Pace pace(kBegin);
  EXPECT_EQ(pace.sleep(stream(pace, kBegin + 1s, 3ms, 20)), 1ms);
}

TEST(Pace, OfAFastLinkStaysAwake) {
  Pace pace(kBegin);
  EXPECT_EQ(pace.sleep(stream(pace, kBegin + 1s, 10us, 20)), 0us);
}

TEST(Pace, AFewLargePacketsAreNoStream) {
  Pace pace(kBegin);
  EXPECT_EQ(pace.sleep(stream(pace, kBegin + 1s, 500us, 8)), 0us);
}

TEST(Pace, AfterAStreamAnswersAreFoundSoon) {
  Pace pace(kBegin);
  const auto last = stream(pace, kBegin + 1s, 500us, 100);
  EXPECT_EQ(pace.sleep(last + 4ms), 1ms);
  const auto later = last + 5ms;
  pace.moved(later);
  EXPECT_EQ(pace.sleep(later), 0us);
  EXPECT_EQ(pace.sleep(later + 100us), 20us);
  EXPECT_EQ(pace.sleep(stream(pace, later, 500us, 8)), 0us);  // another stream has to begin first
}

TEST(Pace, FollowsALinkThatBecomesFaster) {
  Pace pace(kBegin);
  const auto last = stream(pace, kBegin + 1s, 200us, 1000);
  EXPECT_EQ(pace.sleep(last), 800us);
  EXPECT_LT(pace.sleep(stream(pace, last, 50us, 200)), 240us);
}

}  // namespace pace_test
}  // namespace sluice::comm
