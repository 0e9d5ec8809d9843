#pragma once
#include <cstddef>
#include <memory>
#include <type_traits>

namespace sluice {

// The compute threads of one engine (a oneTBB arena). Pieces of a loop are cut at multiples of the grain, never by the
// number of threads, so that what a piece computes does not depend on how many threads there are.
// Thread rule: any thread may call parallel_for; calls from several threads share the arena.
class Threads {
 public:
  explicit Threads(int count);  // REQUIRES: count >= 1
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
  void run(std::size_t n, std::size_t grain, void* state, Piece piece);

  struct Arena;
  int count_;
  std::unique_ptr<Arena> arena_;
};

}  // namespace sluice
