#pragma once
#include <cstddef>
#include <memory>
#include <type_traits>

namespace sluice {

// The compute threads of one engine: a oneTBB arena of its own, or the thread team of another library, such
// as the caller's OpenMP. (Idle OpenMP threads spin while they wait for work; a second set of threads would
// have to share the cores with them.) A loop is cut into ranges at multiples of the grain, never by the
// number of threads, so that a range's result does not depend on how many threads there are. Thread rule: any
// thread may call parallel_for; calls from several threads share the arena.
class Threads {
 public:
  // A function that calls work(data) on up to `threads` threads at once, its caller's among them, and returns
  // when all calls have ended; for example libgomp's GOMP_parallel(). Threads passes 0 for `flags`.
  using Team = void (*)(void (*work)(void* data), void* data, unsigned threads, unsigned flags);

  // Without a team it makes an arena of its own. Throws Error(kInvalidArgument) where count is below 1.
  explicit Threads(int count, Team team = nullptr);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return count_; }
  Team team() const { return team_; }  // null: an arena of its own

  // Calls body(begin, end) for [0, grain), [grain, 2 * grain), ... up to n, in parallel, and waits for all
  // calls. Throws the first exception that a call threw. n == 0 does nothing. REQUIRES: grain >= 1
  template <class Body>
  void parallel_for(std::size_t n, std::size_t grain, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run(n, grain, const_cast<void*>(static_cast<const void*>(&body)),
        [](void* state, std::size_t begin, std::size_t end) { (*static_cast<Plain*>(state))(begin, end); });
  }

 private:
  using RangeBody = void (*)(void* state, std::size_t begin, std::size_t end);
  struct Loop;
  void run(std::size_t n, std::size_t grain, void* state, RangeBody body);

  struct Arena;
  int count_;
  Team team_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace sluice
