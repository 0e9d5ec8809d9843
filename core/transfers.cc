#include "core/transfers.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>

#include "core/error.h"

namespace sluice {

Done after(std::size_t calls, Done done) {
  struct State {
    std::mutex mutex;
    std::size_t left;
    std::exception_ptr error;
  };
  auto state = std::make_shared<State>();
  state->left = calls;
  return [state, done = std::move(done)](std::exception_ptr error) {
    {
      const std::lock_guard lock(state->mutex);
      if (state->error == nullptr) state->error = std::move(error);
      if (--state->left > 0) return;
    }
    done(state->error);
  };
}

struct TransferGroup::State {
  std::mutex mutex;
  std::condition_variable none_open;
  std::size_t open = 0;
  std::exception_ptr first_error;

  void end(std::exception_ptr error) {
    const std::lock_guard lock(mutex);
    if (first_error == nullptr) first_error = std::move(error);
    if (--open == 0) none_open.notify_all();
  }
  void wait(std::unique_lock<std::mutex>& lock) {
    none_open.wait(lock, [&] { return open == 0; });
  }
};

namespace {

// One transfer's membership in the group. If a transfer is refused, its Done is destroyed without a call; the
// group must then neither wait for ever nor report success.
template <class State>
class Ticket {
 public:
  explicit Ticket(std::shared_ptr<State> state) : state_(std::move(state)) {}
  Ticket(const Ticket&) = delete;
  Ticket& operator=(const Ticket&) = delete;
  ~Ticket() {
    if (state_ != nullptr)
      end(std::make_exception_ptr(
          Error(ErrorCode::kState, "a transfer of this group was refused, so it never ran")));
  }
  void end(std::exception_ptr error) { std::exchange(state_, nullptr)->end(std::move(error)); }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace

TransferGroup::TransferGroup() : state_(std::make_shared<State>()) {}
TransferGroup::TransferGroup(TransferGroup&&) noexcept = default;

TransferGroup::~TransferGroup() {
  if (state_ == nullptr) return;
  std::unique_lock lock(state_->mutex);
  state_->wait(lock);
}

Done TransferGroup::add() {
  {
    const std::lock_guard lock(state_->mutex);
    ++state_->open;
  }
  return [ticket = std::make_shared<Ticket<State>>(state_)](std::exception_ptr error) {
    ticket->end(std::move(error));
  };
}

bool TransferGroup::finished() const {
  const std::lock_guard lock(state_->mutex);
  return state_->open == 0;
}

bool TransferGroup::wait_for(std::chrono::microseconds time) const {
  std::unique_lock lock(state_->mutex);
  return state_->none_open.wait_for(lock, time, [&] { return state_->open == 0; });
}

// Each call of `meanwhile` wakes this thread, which takes processor time from the threads it waits for. So
// the calls become rarer the longer they have found nothing to do.
void TransferGroup::wait(const std::function<void()>& meanwhile) {
  using std::chrono::microseconds;
  using Clock = std::chrono::steady_clock;
  constexpr microseconds kLeast{200}, kMost{2000}, kNothingToDo{50};
  auto idle_since = Clock::now();
  while (meanwhile) {
    const auto idle = std::chrono::duration_cast<microseconds>(Clock::now() - idle_since);
    if (wait_for(std::clamp(idle / 8, kLeast, kMost))) break;
    const auto begin = Clock::now();
    meanwhile();
    if (const auto end = Clock::now(); end - begin > kNothingToDo) idle_since = end;
  }
  wait();
}

void TransferGroup::wait() {
  std::exception_ptr error;
  {
    std::unique_lock lock(state_->mutex);
    state_->wait(lock);
    error = std::exchange(state_->first_error, nullptr);
  }
  if (error != nullptr) std::rethrow_exception(error);
}

}  // namespace sluice
