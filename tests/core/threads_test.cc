#include "core/threads.h"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "core/error.h"
#include "testing.h"

namespace sluice::threads_test {

using Ranges = std::multiset<std::pair<std::size_t, std::size_t>>;

Ranges ranges_of(Threads& threads, std::size_t n, std::size_t grain) {
  Ranges ranges;
  std::mutex mutex;
  threads.parallel_for(n, grain, [&](std::size_t begin, std::size_t end) {
    const std::lock_guard lock(mutex);
    ranges.emplace(begin, end);
  });
  return ranges;
}

TEST(Threads, RangesAreCutAtTheGrainWhateverTheCount) {
  for (const int count : {1, 2, 3, 8}) {
    Threads threads(count);
    EXPECT_EQ(threads.count(), count);
    for (const std::size_t n : {0u, 1u, 7u, 8u, 9u, 1000u})
      for (const std::size_t grain : {1u, 8u, 2000u}) {
        Ranges expected;
        for (std::size_t begin = 0; begin < n; begin += grain)
          expected.emplace(begin, std::min(n, begin + grain));
        EXPECT_EQ(ranges_of(threads, n, grain), expected) << count << " threads, " << n << " by " << grain;
      }
  }
}

// A team as an OpenMP library's, but of new threads in each call.
void plain_team(void (*work)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; ++i) others.emplace_back(work, data);
  work(data);
  for (std::thread& other : others) other.join();
}

TEST(Threads, AnotherLibrarysTeamWorksOnTheSameRanges) {
  Threads own(3), given(3, plain_team);
  EXPECT_EQ(given.count(), 3);
  for (const std::size_t n : {0u, 1u, 8u, 1000u})
    EXPECT_EQ(ranges_of(given, n, 8), ranges_of(own, n, 8)) << n;
}

bool so_many_meet(Threads& threads, int wanted) {
  std::atomic<int> inside{0};
  std::atomic<bool> met{false};
  threads.parallel_for(64, 1, [&](std::size_t, std::size_t) {
    ++inside;
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(200);
    while (!met && std::chrono::steady_clock::now() < end)
      if (inside >= wanted) met = true;
    --inside;
  });
  return met;
}

TEST(Threads, RunSeveralAtOnce) {
  Threads threads(4);
  EXPECT_TRUE(so_many_meet(threads, 2)) << "no two ranges ran at the same time";
}

TEST(Threads, AreNotLimitedByOtherThreadsObjects) {
  const Threads one(1), two(2);
  Threads four(4), given(4, plain_team);
  EXPECT_TRUE(so_many_meet(four, 3)) << "no three ranges ran at the same time";
  EXPECT_TRUE(so_many_meet(given, 3)) << "no three ranges ran at the same time on the team";
}

TEST(Threads, RunNoMoreAtOnceThanTheirCount) {
  Threads threads(2);
  std::atomic<int> inside{0}, most{0};
  threads.parallel_for(200, 1, [&](std::size_t, std::size_t) {
    const int now = ++inside;
    int seen = most;
    while (seen < now && !most.compare_exchange_weak(seen, now)) {
    }
    std::this_thread::yield();
    --inside;
  });
  EXPECT_LE(most, 2);
  EXPECT_GE(most, 1);
}

TEST(Threads, AnExceptionOfARangeIsThrownToTheCaller) {
  for (const auto& [count, team] :
       std::vector<std::pair<int, Threads::Team>>{{1, nullptr}, {3, nullptr}, {3, plain_team}}) {
    Threads threads(count, team);
    EXPECT_THROW(threads.parallel_for(100, 1,
                                      [](std::size_t begin, std::size_t) {
                                        if (begin == 57) throw std::out_of_range("57");
                                      }),
                 std::out_of_range);
    std::atomic<int> ran{0};
    threads.parallel_for(10, 1, [&](std::size_t, std::size_t) { ++ran; });
    EXPECT_EQ(ran, 10);
  }
}

TEST(Threads, SeveralCallersShareThem) {
  Threads threads(2);
  std::vector<std::uint64_t> sums(4);
  std::vector<std::thread> callers;
  for (std::size_t caller = 0; caller < sums.size(); ++caller)
    callers.emplace_back([&, caller] {
      std::atomic<std::uint64_t> sum{0};
      for (int round = 0; round < 50; ++round)
        threads.parallel_for(1000, 7, [&](std::size_t begin, std::size_t end) {
          for (std::size_t i = begin; i < end; ++i) sum += i;
        });
      sums[caller] = sum;
    });
  for (std::thread& caller : callers) caller.join();
  for (const std::uint64_t sum : sums) EXPECT_EQ(sum, 50u * 499500u);
}

TEST(Threads, LoopsMayNest) {
  Threads threads(2);
  std::atomic<int> ran{0};
  threads.parallel_for(8, 1, [&](std::size_t, std::size_t) {
    threads.parallel_for(8, 1, [&](std::size_t, std::size_t) { ++ran; });
  });
  EXPECT_EQ(ran, 64);
}

// Neither the modes of the caller's thread nor those of the team's threads change the bits.
TEST(Threads, EveryThreadKeepsSubnormalNumbersAndRoundsToNearest) {
#if !defined(__SSE2__)
  GTEST_SKIP() << "how a thread is told to flush subnormal numbers is known here for x86 alone";
#else
  constexpr unsigned kFlush = 0x8040, kDown = 0x2000;
  for (const auto& [count, team] :
       std::vector<std::pair<int, Threads::Team>>{{1, nullptr}, {3, nullptr}, {3, plain_team}}) {
    Threads threads(count, team);
    std::vector<float> halves(64), thirds(64);
    volatile float least = std::numeric_limits<float>::min(), one = 1, three = 3;
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | kFlush | kDown);
    threads.parallel_for(halves.size(), 1, [&](std::size_t begin, std::size_t end) {
      for (std::size_t i = begin; i < end; ++i) halves[i] = least / 2, thirds[i] = one / three;
    });
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    EXPECT_EQ(after & 0xFFC0u, (before | kFlush | kDown) & 0xFFC0u) << "the caller's own setting is back";
    EXPECT_THAT(halves, testing::Each(std::numeric_limits<float>::min() / 2));
    EXPECT_THAT(thirds, testing::Each(1.0f / 3.0f));
  }
#endif
}

TEST(Threads, ZeroThreadsAreRefused) {
  for (const int count : {0, -1}) EXPECT_THROW(Threads threads(count), Error);
}

}  // namespace sluice::threads_test
