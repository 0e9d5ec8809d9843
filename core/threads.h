#pragma once
#include <cstddef>
#include <memory>
#include <type_traits>

namespace sluice {

// The compute threads of one engine: a oneTBB arena, or a team that somebody else has, as an OpenMP library
// does. Where the caller's own loops run on such a team, its threads wait for more work spinning, and others
// would have to share their cores. Pieces of a loop are cut at multiples of the grain, never by the number of
// threads, so that what a piece computes does not depend on how many threads there are. Thread rule: any
// thread may call parallel_for; calls from several threads share the arena.
class Threads {
 public:
  // Calls work(data) on up to `threads` threads at once, its caller's one of them, and returns when all have
  // ended. libgomp's GOMP_parallel() is one. flags: 0.
  using Team = void (*)(void (*work)(void* data), void* data, unsigned threads, unsigned flags);

  // team: null: threads of its own. Throws Error(kInvalidArgument). REQUIRES: count >= 1
  explicit Threads(int count, Team team = nullptr);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return count_; }

  // Calls body(begin, end) for [0, grain), [grain, 2 * grain), ... up to n, in parallel, and waits for all.
  // The first exception thrown by a piece is thrown here. n == 0 does nothing. REQUIRES: grain >= 1
  template <class Body>
  void parallel_for(std::size_t n, std::size_t grain, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run(n, grain, const_cast<void*>(static_cast<const void*>(&body)),
        [](void* state, std::size_t begin, std::size_t end) { (*static_cast<Plain*>(state))(begin, end); });
  }

 private:
  using Piece = void (*)(void* state, std::size_t begin, std::size_t end);
  struct Loop;
  void run(std::size_t n, std::size_t grain, void* state, Piece piece);

  struct Arena;
  int count_;
  Team team_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace sluice
