#include "core/threads.h"

#include <tbb/parallel_for.h>
#include <tbb/global_control.h>
#include <tbb/task_arena.h>

#include <algorithm>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice {

struct Threads::Arena {
  // Without it oneTBB would not make more workers than the machine has cores.
  tbb::global_control limit;
  tbb::task_arena arena;
  explicit Arena(int count)
      : limit(tbb::global_control::max_allowed_parallelism, static_cast<std::size_t>(std::max(count, 2))), arena(count) {}
};

Threads::Threads(int count) : count_(count) {
  if (count < 1) fail(ErrorCode::kInvalidArgument, "a number of threads of at least 1 is needed, {} was given", count);
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
  arena_->arena.execute([&] {
    tbb::parallel_for(
        tbb::blocked_range<std::size_t>(0, pieces, 1),
        [&](const tbb::blocked_range<std::size_t>& range) {
          for (std::size_t i = range.begin(); i < range.end(); ++i) piece(state, i * grain, std::min(n, (i + 1) * grain));
        });
  });
}

}  // namespace sluice
