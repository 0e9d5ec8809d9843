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
// For ThreadSanitizer, which cannot follow a oneTBB that was not built with it.
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
  // Without it oneTBB would not make more workers than the machine has cores. Of all that exist the smallest
  // rules, so there is none where it is not needed.
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

// Arithmetic as IEEE 754 has it while this lives, with subnormal numbers and the nearest value: a caller, or
// the library that a team is of, may have told some threads otherwise, and which thread computes what is
// chance.
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

// A loop that a team works on; each of its threads takes the next piece until none is left.
struct Threads::Loop {
  std::size_t n, grain, pieces;
  void* state;
  Piece piece;
  std::atomic<std::size_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error = nullptr;  // the first

  void call(std::size_t i) const {
    const PlainArithmetic arithmetic;
    piece(state, i * grain, std::min(n, (i + 1) * grain));
  }

  static void work(void* data) {
    Loop& loop = *static_cast<Loop*>(data);
    try {
      for (std::size_t i = loop.next++; i < loop.pieces && !loop.failed; i = loop.next++) loop.call(i);
    } catch (...) {
      if (!loop.failed.exchange(true)) loop.error = std::current_exception();
    }
  }
};

Threads::Threads(int count, Team team) : count_(count), team_(team) {
  if (count < 1)
    fail(ErrorCode::kInvalidArgument, "a number of threads of at least 1 is needed, {} was given", count);
  if (team == nullptr) arena_ = std::make_unique<Arena>(count);
}
Threads::~Threads() = default;

void Threads::run(std::size_t n, std::size_t grain, void* state, Piece piece) {
  Loop loop{n, grain, divide_up(n, grain), state, piece};
  if (loop.pieces <= 1 || count_ == 1) {
    for (std::size_t i = 0; i < loop.pieces; ++i) loop.call(i);
  } else if (team_ == nullptr) {
    arena_->for_each(loop.pieces, [&](std::size_t i) { loop.call(i); });
  } else {
    team_(&Loop::work, &loop, static_cast<unsigned>(count_), 0);
    if (loop.error) std::rethrow_exception(loop.error);
  }
}

}  // namespace sluice
