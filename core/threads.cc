#include "core/threads.h"

#ifdef SLUICE_PLAIN_THREADS
#include <atomic>
#include <exception>
#include <thread>
#include <vector>
#else
#include <tbb/global_control.h>
#include <tbb/info.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <optional>
#endif

#include <algorithm>

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

Threads::Threads(int count) : count_(count) {
  if (count < 1)
    fail(ErrorCode::kInvalidArgument, "a number of threads of at least 1 is needed, {} was given", count);
  arena_ = std::make_unique<Arena>(count);
}
Threads::~Threads() = default;

void Threads::run(std::size_t n, std::size_t grain, void* state, Piece piece) {
  const std::size_t pieces = divide_up(n, grain);
  if (pieces == 0) return;
  if (pieces == 1 || count_ == 1) {
    for (std::size_t i = 0; i < pieces; ++i) piece(state, i * grain, std::min(n, (i + 1) * grain));
    return;
  }
  arena_->for_each(pieces, [&](std::size_t i) { piece(state, i * grain, std::min(n, (i + 1) * grain)); });
}

}  // namespace sluice
