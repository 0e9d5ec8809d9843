#pragma once
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>

namespace sluice {

// A completion callback: called once, on any thread, when a transfer has ended. error is null where every
// byte was moved. The buffer may be used again from then on. The callback must be short and must not throw.
using Done = std::function<void(std::exception_ptr error)>;

// Returns a Done that calls `done` after it was itself called `calls` times, with the first error. REQUIRES:
// calls > 0.
Done after(std::size_t calls, Done done);

// A set of transfers that a caller waits for together. wait() returns when all have ended, and throws the
// first error. Thread rule: add() and wait() from one thread; the Done functions from any.
class TransferGroup {
 public:
  TransferGroup();
  ~TransferGroup();  // waits for all transfers
  TransferGroup(TransferGroup&&) noexcept;
  TransferGroup& operator=(TransferGroup&&) = delete;
  Done add();  // makes the Done for one more transfer
  bool finished() const;
  bool wait_for(std::chrono::microseconds time) const;  // waits at most this long; returns finished()
  void wait();
  void wait(const std::function<void()>& meanwhile);  // calls `meanwhile`, if not null, from time to time

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace sluice
