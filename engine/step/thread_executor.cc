#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

#include "engine/step/update_executor.h"

namespace sluice::engine {
namespace {

class ThreadExecutor final : public UpdateExecutor {
 public:
  explicit ThreadExecutor(std::unique_ptr<UpdateExecutor> turns)
      : turns_(std::move(turns)), thread_([this] { work_all(); }) {}
  ~ThreadExecutor() override {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  ThreadExecutor(const ThreadExecutor&) = delete;
  ThreadExecutor& operator=(const ThreadExecutor&) = delete;

  void start(allocator::Ledger& ledger) override { turns_->start(ledger); }
  void begin(const ChunkWork& work, Done done) override {
    {
      const std::lock_guard lock(mutex_);
      works_.push_back({work, std::move(done)});
    }
    changed_.notify_all();
  }
  Threads& threads() override { return turns_->threads(); }
  double seconds() const override { return seconds_; }

 private:
  struct Begun {
    ChunkWork work;
    Done done;
  };
  void work_all() {
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ends_ || !works_.empty(); });
      if (works_.empty()) return;
      const Begun next = std::move(works_.front());
      works_.pop_front();
      lock.unlock();
      turns_->begin(next.work, [&](std::exception_ptr error) {
        seconds_ = turns_->seconds();
        next.done(std::move(error));
      });
    }
  }

  const std::unique_ptr<UpdateExecutor> turns_;
  std::atomic<double> seconds_ = 0;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Begun> works_;
  bool ends_ = false;
  std::thread thread_;  // comes last, since it uses the rest
};

}  // namespace

std::unique_ptr<UpdateExecutor> make_thread_executor(std::unique_ptr<UpdateExecutor> turns) {
  return std::make_unique<ThreadExecutor>(std::move(turns));
}

}  // namespace sluice::engine
