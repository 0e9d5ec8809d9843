#pragma once
#include "testing.h"

namespace sluice {

// Under ThreadSanitizer all takes ten times as long and more.
#ifdef __SANITIZE_THREAD__
inline constexpr std::chrono::seconds kMostSeconds{900};
#else
inline constexpr std::chrono::seconds kMostSeconds{120};
#endif

// Ends the test program with a message where it is not destroyed in time, so that a hang is a failure.
class Watchdog {
 public:
  explicit Watchdog(std::string what = "a test of ranks", std::chrono::seconds limit = kMostSeconds)
      : thread_([this, what = std::move(what), limit] {
          std::unique_lock lock(mutex_);
          if (ended_.wait_for(lock, limit, [this] { return is_over_; })) return;
          std::fprintf(stderr, "%s has hung for %d s\n", what.c_str(), static_cast<int>(limit.count()));
          std::abort();
        }) {}
  ~Watchdog() {
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    ended_.notify_all();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool is_over_ = false;
  std::thread thread_;
};

}  // namespace sluice
