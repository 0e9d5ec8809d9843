#include <algorithm>
#include <condition_variable>
#include <list>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "engine/updates/update_executor.h"

namespace sluice::engine {
namespace {

class ThreadExecutor final : public UpdateExecutor {
 public:
  explicit ThreadExecutor(std::vector<std::unique_ptr<UpdateExecutor>> executors)
      : executors_(std::move(executors)), seconds_(executors_.size()) {
    for (std::size_t i = 0; i < executors_.size(); ++i) threads_.emplace_back([this, i] { work_all(i); });
  }
  ~ThreadExecutor() override {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  ThreadExecutor(const ThreadExecutor&) = delete;
  ThreadExecutor& operator=(const ThreadExecutor&) = delete;

  void start(allocator::Ledger& ledger) override {
    for (const auto& executor : executors_) executor->start(ledger);
  }
  void begin(const ChunkWork& work, Done done) override {
    {
      const std::lock_guard lock(mutex_);
      works_.push_back({work, std::move(done)});
    }
    changed_.notify_one();
  }
  void hurry(std::optional<UnitId> unit) override {
    const std::lock_guard lock(mutex_);
    hurried_ = unit;
  }
  Threads& threads() override { return executors_.front()->threads(); }
  // The mean over the threads, so that it compares with the seconds of a step.
  double seconds() const override {
    const std::lock_guard lock(mutex_);
    double sum = 0;
    for (const double seconds : seconds_) sum += seconds;
    return sum / static_cast<double>(executors_.size());
  }

 private:
  struct Begun {
    ChunkWork work;
    Done done;
  };
  // REQUIRES: the lock, and a work. With an optimizer's rounds the order must not change.
  Begun take_next() {
    auto next = works_.begin();
    if (hurried_ && executors_.size() > 1)
      next = std::ranges::find(works_, *hurried_, [](const Begun& begun) { return begun.work.update.unit; });
    if (next == works_.end()) next = works_.begin();
    Begun taken = std::move(*next);
    works_.erase(next);
    return taken;
  }
  void work_all(std::size_t i) {
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ends_ || !works_.empty(); });
      if (works_.empty()) return;
      const Begun next = take_next();
      lock.unlock();
      executors_[i]->begin(next.work, [&](std::exception_ptr error) {
        {
          const std::lock_guard counting(mutex_);
          seconds_[i] = executors_[i]->seconds();
        }
        next.done(std::move(error));
      });
    }
  }

  const std::vector<std::unique_ptr<UpdateExecutor>> executors_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::list<Begun> works_;
  std::optional<UnitId> hurried_;
  std::vector<double> seconds_;  // by thread
  bool ends_ = false;
  std::vector<std::thread> threads_;  // last, since the threads use the rest
};

}  // namespace

std::unique_ptr<UpdateExecutor> make_thread_executor(std::vector<std::unique_ptr<UpdateExecutor>> executors) {
  return std::make_unique<ThreadExecutor>(std::move(executors));
}

}  // namespace sluice::engine
