#include "engine/memory/nccl_turns.h"

#include <chrono>
#include <span>
#include <string>
#include <utility>

#include "core/error.h"
#include "engine/ranks/call_id.h"

namespace sluice::engine {
namespace {

constexpr std::chrono::milliseconds kLook{100};

}  // namespace

void NcclTurns::take(std::uint64_t key, const std::function<void()>& queue) {
  if (communicator_.rank() == 0) {
    const std::lock_guard turn(turn_);
    tell(key);
    return queue();
  }
  ask();
  wait_for(key);
  try {
    queue();  // the key stays the next one meanwhile
  } catch (...) {
    const std::lock_guard lock(told_->mutex);
    told_->failure = std::current_exception();
    told_->changes.notify_all();
    throw;
  }
  const std::lock_guard lock(told_->mutex);
  told_->next.pop_front();
  told_->changes.notify_all();
}

// A key whose turn never comes, since another rank has failed, is told by the failure of the run alone.
void NcclTurns::wait_for(std::uint64_t key) {
  std::unique_lock lock(told_->mutex);
  const auto is_over = [&] {
    return told_->failure != nullptr || (!told_->next.empty() && told_->next.front() == key);
  };
  while (!told_->changes.wait_for(lock, kLook, is_over))
    if (const std::string failure = communicator_.failure(); !failure.empty())
      fail(ErrorCode::kIo, "{}", failure);
  if (told_->failure != nullptr) std::rethrow_exception(told_->failure);
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
