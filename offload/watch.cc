#include "offload/watch.h"

#include <algorithm>
#include <optional>

#include "core/error.h"

namespace sluice::offload {
namespace {

// Patience is counted in wake-ups of the watching thread, not by the clock. So a process that was stopped
// first has time to see the transfers that have ended meanwhile.
constexpr int kLooks = 8;

struct WatchedCall {
  std::function<int()> function;
  std::mutex mutex;
  std::condition_variable ended;
  std::optional<int> result;
};

void run(const std::shared_ptr<WatchedCall>& call) {
  const int result = call->function();
  const std::lock_guard lock(call->mutex);
  call->result = result;
  call->ended.notify_all();
}

}  // namespace

int call_with_patience(std::chrono::milliseconds patience, const std::string& what,
                       std::function<int()> call) {
  const auto shared = std::make_shared<WatchedCall>();
  shared->function = std::move(call);
  std::thread([shared] { run(shared); }).detach();
  std::unique_lock lock(shared->mutex);
  for (int look = 0; look <= kLooks && !shared->result; ++look)
    shared->ended.wait_for(lock, patience / kLooks, [&] { return shared->result.has_value(); });
  if (shared->result) return *shared->result;
  fail(ErrorCode::kIo, "{}: no answer for {:.3g} s; the device hangs: see the kernel's log", what,
       std::chrono::duration<double>(patience).count());
}

Watch::Watch(std::chrono::milliseconds patience) : patience_(patience), thread_([this] { work(); }) {}

Watch::~Watch() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Watch::begun(const std::shared_ptr<Transfer>& transfer) {
  const std::lock_guard lock(mutex_);
  const bool was_idle = files_.empty();
  files_[&transfer->open()].transfers.push_back(transfer);
  if (was_idle) changed_.notify_all();
}

void Watch::moved(const Transfer& transfer) {
  const std::lock_guard lock(mutex_);
  if (const auto found = files_.find(&transfer.open()); found != files_.end()) found->second.idle_looks = 0;
}

void Watch::ended(const Transfer& transfer) {
  const std::lock_guard lock(mutex_);
  const auto found = files_.find(&transfer.open());
  if (found == files_.end()) return;
  std::erase_if(found->second.transfers, [&](const auto& other) { return other.get() == &transfer; });
  if (found->second.transfers.empty()) files_.erase(found);
}

bool Watch::waits_for_system() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(given_up_.begin(), given_up_.end(),
                     [](const auto& transfer) { return !transfer.expired(); });
}

void Watch::work() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    changed_.wait(lock, [&] { return stopping_ || !files_.empty(); });
    if (changed_.wait_for(lock, patience_ / kLooks, [&] { return stopping_; })) return;
    const std::vector<std::shared_ptr<Transfer>> stuck = take_stuck();
    if (stuck.empty()) continue;
    lock.unlock();
    give_up(stuck);
    lock.lock();
  }
}

std::vector<std::shared_ptr<Transfer>> Watch::take_stuck() {
  std::vector<std::shared_ptr<Transfer>> stuck;
  for (auto file = files_.begin(); file != files_.end();) {
    if (++file->second.idle_looks <= kLooks) {
      ++file;
      continue;
    }
    for (const auto& transfer : file->second.transfers) given_up_.push_back(transfer);
    stuck.insert(stuck.end(), file->second.transfers.begin(), file->second.transfers.end());
    file = files_.erase(file);
  }
  return stuck;
}

void Watch::give_up(const std::vector<std::shared_ptr<Transfer>>& stuck) {
  for (const auto& transfer : stuck) transfer->abandon(transfer_stuck(*transfer, patience_));
}

}  // namespace sluice::offload
