#include "core/threads.h"

#include <algorithm>
#include <atomic>
#include <exception>

#if defined(__SSE2__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

#ifdef SLUICE_PLAIN_THREADS
#include <thread>
#include <vector>
#else
#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <optional>
#endif

#include "core/bytes.h"
#include "core/error.h"

namespace sluice {

#ifdef SLUICE_PLAIN_THREADS
// ThreadSanitizer cannot follow a oneTBB that was built without it, so its builds use plain threads.
struct Threads::Arena {
  int count;
  explicit Arena(int the_count) : count(the_count) {}

  template <class Body>
  void for_each(std::size_t n, const Body& body) const {
    std::atomic<std::size_t> next{0};
    std::vector<std::exception_ptr> errors(static_cast<std::size_t>(count));
    std::vector<std::thread> workers;
    for (std::exception_ptr& error : errors)
      workers.emplace_back([&] {
        try {
          for (std::size_t i = next++; i < n; i = next++) body(i);
        } catch (...) {
          error = std::current_exception();
        }
      });
    for (std::thread& worker : workers) worker.join();
    for (const std::exception_ptr& error : errors)
      if (error) std::rethrow_exception(error);
  }
};
#else
struct Threads::Arena {
  // Allows oneTBB more workers than cores. The smallest limit in the process applies, so one is made only
  // where it is needed.
  std::optional<tbb::global_control> limit;
  tbb::task_arena arena;
  explicit Arena(int count) : arena(count) {
    if (count > tbb::info::default_concurrency())
      limit.emplace(tbb::global_control::max_allowed_parallelism, static_cast<std::size_t>(count));
  }

  template <class Body>
  void for_each(std::size_t n, const Body& body) {
    arena.execute([&] {
      tbb::parallel_for(tbb::blocked_range<std::size_t>(0, n, 1),
                        [&](const tbb::blocked_range<std::size_t>& range) {
                          for (std::size_t i = range.begin(); i < range.end(); ++i) body(i);
                        });
    });
  }
};
#endif

// Makes the calling thread keep subnormal numbers and round to nearest (IEEE 754) while it lives. A caller,
// or the library whose team this is, may have set some threads otherwise, and results must not depend on
// which thread computes which range.
class PlainArithmetic {
 public:
#if defined(__SSE2__)
  PlainArithmetic() : before_(_mm_getcsr()) {
    if ((before_ & ~kFlags) != kDefault) _mm_setcsr(kDefault);
  }
  ~PlainArithmetic() {
    if ((before_ & ~kFlags) != kDefault) _mm_setcsr(before_);
  }

 private:
  static constexpr unsigned kFlags = 0x3F, kDefault = 0x1F80;
  const unsigned before_;
#else
  PlainArithmetic() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~PlainArithmetic() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
#endif
 public:
  PlainArithmetic(const PlainArithmetic&) = delete;
  PlainArithmetic& operator=(const PlainArithmetic&) = delete;
};

// A loop over ranges of `grain` indices. Each thread takes the next range until none is left.
struct Threads::Loop {
  std::size_t n, grain, ranges;
  void* state;
  RangeBody body;
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error = nullptr;  // the first one thrown

  void call(std::size_t i) const {
    const PlainArithmetic arithmetic;
    body(state, i * grain, std::min(n, (i + 1) * grain));
  }

  static void work(void* data) {
    Loop& loop = *static_cast<Loop*>(data);
    try {
      for (std::size_t i = loop.next++; i < loop.ranges && !loop.failed; i = loop.next++) loop.call(i);
    } catch (...) {
      if (!loop.failed.exchange(true)) loop.error = std::current_exception();
    }
  }
};

Threads::Threads(int count, Team of_others) : count_(count), team_(of_others) {
  if (count < 1) fail(ErrorCode::kInvalidArgument, "{} threads were asked for; at least 1 is needed", count);
  if (of_others == nullptr) arena_ = std::make_unique<Arena>(count);
}
Threads::~Threads() = default;

void Threads::run(std::size_t n, std::size_t grain, void* state, RangeBody body) {
  Loop loop{n, grain, divide_up(n, grain), state, body};
  if (loop.ranges <= 1 || (count_ == 1 && team_ == nullptr)) {
    for (std::size_t i = 0; i < loop.ranges; ++i) loop.call(i);
  } else if (team_ == nullptr) {
    arena_->for_each(loop.ranges, [&](std::size_t i) { loop.call(i); });
  } else {
    team_(&Loop::work, &loop, static_cast<unsigned>(count_), 0);
    if (loop.error) std::rethrow_exception(loop.error);
  }
}

}  // namespace sluice
