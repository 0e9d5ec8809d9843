#pragma once
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>

namespace sluice {

// Called once, on any thread, when a transfer has ended; error is null where every byte was moved. From then
// on the buffer may be used again. It must be short and must not throw.
using Done = std::function<void(std::exception_ptr error)>;

// Returns a Done that calls `done` when it was called so often, with the first error. REQUIRES: calls > 0.
Done after(std::size_t calls, Done done);

// Transfers that a caller waits for together. wait() throws the first error after all have ended. Thread
// rule: add() and wait() from one thread; the Done functions from any.
class TransferGroup {
 public:
  TransferGroup();
  ~TransferGroup();  // waits for all transfers
  TransferGroup(TransferGroup&&) noexcept;
  TransferGroup& operator=(TransferGroup&&) = delete;
  Done add();  // makes the Done for one more transfer
  bool finished() const;
  bool wait_for(std::chrono::microseconds time) const;  // returns finished() by then at the latest
  void wait();
  void wait(const std::function<void()>& meanwhile);  // which, if not null, is called from time to time

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace sluice
