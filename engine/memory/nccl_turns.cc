#include "engine/memory/nccl_turns.h"

#include <span>
#include <utility>

#include "engine/ranks/call_id.h"

namespace sluice::engine {

void NcclTurns::take(std::uint64_t key, const std::function<void()>& queue) {
  if (communicator_.rank() == 0) {
    const std::lock_guard turn(turn_);
    tell(key);
    return queue();
  }
  ask();
  std::unique_lock lock(told_->mutex);
  told_->changes.wait(lock, [&] {
    return told_->failure != nullptr || (!told_->next.empty() && told_->next.front() == key);
  });
  if (told_->failure != nullptr) std::rethrow_exception(told_->failure);
  lock.unlock();
  queue();  // the key stays the next one meanwhile
  lock.lock();
  told_->next.pop_front();
  told_->changes.notify_all();
}

void NcclTurns::tell(std::uint64_t key) {
  const auto sent = std::make_shared<std::uint64_t>(key);
  communicator_.broadcast(call_id(CallKind::kNcclTurn, 0), "whose turn it is to use NCCL",
                          std::as_writable_bytes(std::span(sent.get(), 1)), 0, [sent](std::exception_ptr) {});
}

// Each turn takes one key, so as many are asked for as there are turns.
void NcclTurns::ask() {
  const auto came = std::make_shared<std::uint64_t>();
  const std::lock_guard turn(turn_);
  communicator_.broadcast(call_id(CallKind::kNcclTurn, 0), "whose turn it is to use NCCL",
                          std::as_writable_bytes(std::span(came.get(), 1)), 0,
                          [came, told = told_](std::exception_ptr error) {
                            const std::lock_guard lock(told->mutex);
                            if (error != nullptr)
                              told->failure = std::move(error);
                            else
                              told->next.push_back(*came);
                            told->changes.notify_all();
                          });
}

}  // namespace sluice::engine
