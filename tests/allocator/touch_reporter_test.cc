#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/allocator/support.h"

namespace sluice::allocator::touch_reporter_test {

// A test may touch a null address on purpose.
__attribute__((no_sanitize("null"))) void touch(const std::byte* at) {
  static_cast<void>(*const_cast<const volatile std::byte*>(at));
}

class TouchReporterDeathTest : public testing::Test {
 protected:
  TouchReporterDeathTest() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(TouchReporterDeathTest, NamesAHomeThatWasNeverPlaced) {
  const Home home("blocks.7", kHugePage);
  EXPECT_EXIT(
      {
        install_touch_reporter();
        install_touch_reporter();
        touch(home.data() + 12345);
      },
      testing::KilledBySignal(SIGABRT),
      "sluice: the memory of 'blocks.7' was touched while absent; acquire its unit first");
}

TEST_F(TouchReporterDeathTest, NamesAHomeThatWasEmptiedOrShrunk) {
  Ledger ledger;
  FramePool pool(ledger, kHugePage, 4);
  Home home("head", 4 * kHugePage);
  for (const std::size_t keep : {std::size_t{0}, kHugePage, 3 * kHugePage}) {
    ASSERT_TRUE(pool.place(home, home.size(), Purpose::kParameter));
    stamp(home.data(), home.size(), 1);
    pool.shrink(home, keep);
    EXPECT_TRUE(has_stamp(home.data(), keep, 1));
    EXPECT_EXIT(
        {
          install_touch_reporter();
          Home mine("head.in.child", 4 * kHugePage);
          FramePool frames(ledger, kHugePage, 4);
          frames.place(mine, mine.size(), Purpose::kParameter);
          stamp(mine.data(), mine.size(), 1);
          frames.shrink(mine, keep);
          if (has_stamp(mine.data(), keep, 1)) touch(mine.data() + keep);
        },
        testing::KilledBySignal(SIGABRT), "the memory of 'head.in.child' was touched while absent");
    pool.shrink(home, 0);
  }
}

TEST_F(TouchReporterDeathTest, TellsAnAccessBeyondTheEnd) {
  EXPECT_EXIT(
      {
        install_touch_reporter();
        const Home home("embedding", kHugePage);
        touch(home.data() + home.size());
      },
      testing::KilledBySignal(SIGABRT), "'embedding' was accessed beyond its end");
}

// Does as Python's faulthandler: it reports, puts back the handler that it found, and raises the signal
// again.
struct sigaction found_by_other = {};
void tell_and_raise(int number) {
  static_cast<void>(::write(STDERR_FILENO, "told; ", 6));
  ::sigaction(number, &found_by_other, nullptr);
  ::raise(number);
}

TEST_F(TouchReporterDeathTest, ComesFirstAgainAfterAnotherHandlerWasPutOverIt) {
  const auto put_over = [] {
    install_touch_reporter();
    struct sigaction other = {};
    other.sa_handler = tell_and_raise;
    other.sa_flags = static_cast<int>(SA_NODEFER);
    ::sigaction(SIGSEGV, &other, &found_by_other);
    install_touch_reporter();
  };
  EXPECT_EXIT(
      {
        put_over();
        const Home home("blocks.7", kHugePage);
        touch(home.data());
      },
      testing::KilledBySignal(SIGABRT), "^sluice: the memory of 'blocks.7' was touched while absent");
  EXPECT_EXIT(
      {
        put_over();
        touch(nullptr);
      },
      testing::KilledBySignal(SIGSEGV), "^told; $");
}

TEST_F(TouchReporterDeathTest, NamesAHomeWhoseOwnerIsGone) {
  EXPECT_EXIT(
      {
        install_touch_reporter();
        const FormerHome former(Home("blocks.3", kHugePage));
        touch(former.data());
      },
      testing::KilledBySignal(SIGABRT),
      "the memory of 'blocks.3' was touched after its engine was closed without keeping the values");
}

// In a forked child neither the pages under a home nor those of a region exist.
TEST_F(TouchReporterDeathTest, TellsAForkedChild) {
  for (const bool of_region : {false, true}) {
    EXPECT_EXIT(
        {
          install_touch_reporter();
          Ledger ledger;
          FramePool pool(ledger, kHugePage, 1);
          Home home("blocks.1", kHugePage);
          pool.place(home, kHugePage, Purpose::kParameter);
          const Region region(ledger, Purpose::kStaging, kHugePage);
          const pid_t child = ::fork();
          if (child == 0) {
            touch(of_region ? region.data() : home.data());
            ::_exit(0);
          }
          int status = 0;
          ::waitpid(child, &status, 0);
          ::_exit(WIFSIGNALED(status) ? WTERMSIG(status) : 0);
        },
        testing::ExitedWithCode(SIGABRT),
        of_region ? "the memory of 'staging' was touched in a forked child"
                  : "the memory of 'blocks.1' was touched in a forked child");
  }
}

TEST_F(TouchReporterDeathTest, AForkedChildEndsItsCopiesWithoutHarm) {
  EXPECT_EXIT(
      {
        Ledger ledger;
        auto pool = std::make_unique<FramePool>(ledger, kHugePage, 2);
        auto home = std::make_unique<Home>("blocks.1", kHugePage);
        pool->place(*home, kHugePage, Purpose::kParameter);
        stamp(home->data(), kHugePage, 9);
        const pid_t child = ::fork();
        if (child == 0) {
          Home own("own", kHugePage);
          const bool refused =
              thrown_by([&] { pool->place(own, kHugePage, Purpose::kParameter); }).code == ErrorCode::kState;
          home.reset();
          pool.reset();
          ::_exit(refused ? 0 : 1);
        }
        int status = 0;
        ::waitpid(child, &status, 0);
        ::_exit(status == 0 && has_stamp(home->data(), kHugePage, 9) ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

const std::byte* sought = nullptr;
bool address_was_free = false;

void seek_address() {
  void* found = ::mmap(const_cast<std::byte*>(sought), kHugePage, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  address_was_free = found != MAP_FAILED;
}

// A fork handler of another library, which runs before the allocator's, must not be able to map memory where
// pages were: the allocator's handler would destroy it.
TEST_F(TouchReporterDeathTest, AForkedChildHasNoHolesWherePagesWere) {
  for (const bool of_region : {false, true})
    EXPECT_EXIT(
        {
          ::pthread_atfork(nullptr, nullptr, seek_address);
          Ledger ledger;
          FramePool pool(ledger, kHugePage, 1);
          Home home("blocks.1", kHugePage);
          pool.place(home, kHugePage, Purpose::kParameter);
          const Region region(ledger, Purpose::kStaging, kHugePage);
          sought = of_region ? region.data() : home.data();
          const pid_t child = ::fork();
          if (child == 0) ::_exit(address_was_free ? 1 : 0);
          int status = 0;
          ::waitpid(child, &status, 0);
          ::_exit(status == 0 ? 0 : 1);
        },
        testing::ExitedWithCode(0), "");
}

TEST_F(TouchReporterDeathTest, PassesOtherFaultsToTheHandlerBefore) {
  EXPECT_EXIT(
      {
        ::signal(SIGSEGV, [](int) { ::_exit(7); });
        install_touch_reporter();
        ::raise(SIGSEGV);
      },
      testing::ExitedWithCode(7), "");
  EXPECT_EXIT(
      {
        struct sigaction action = {};
        action.sa_flags = SA_SIGINFO;
        action.sa_sigaction = [](int, siginfo_t* info, void*) { ::_exit(info->si_addr != nullptr ? 8 : 9); };
        ::sigaction(SIGSEGV, &action, nullptr);
        install_touch_reporter();
        touch(static_cast<std::byte*>(::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)));
      },
      testing::ExitedWithCode(8), "");
}

TEST_F(TouchReporterDeathTest, WithoutAHandlerBeforeTheFaultEndsTheProcess) {
  for (const bool raised : {true, false})
    EXPECT_EXIT(
        {
          ::signal(SIGSEGV, SIG_DFL);
          install_touch_reporter();
          if (raised) ::raise(SIGSEGV);
          touch(
              static_cast<std::byte*>(::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)));
        },
        testing::KilledBySignal(SIGSEGV), "");
}

TEST_F(TouchReporterDeathTest, APoolMayNotEndBeforeItsHomes) {
  EXPECT_DEATH(
      {
        Ledger ledger;
        Home home("late", kHugePage);
        FramePool pool(ledger, kHugePage, 1);
        pool.place(home, kHugePage, Purpose::kParameter);
      },
      "a frame pool ended while homes hold 1 of its 1 extents");
}

}  // namespace sluice::allocator::touch_reporter_test
