#include "core/serial_queue.h"

#include <exception>
#include <utility>

namespace sluice {

SerialQueue::SerialQueue() : thread_([this] { work(); }) {}

SerialQueue::~SerialQueue() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void SerialQueue::add(Job job, Done done) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back({std::move(job), std::move(done)});
  changed_.notify_all();  // inside the lock: once the job has run, the queue may be destroyed
}

void SerialQueue::work() {
  while (true) {
    Added next;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ends_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      next = std::move(jobs_.front());
      jobs_.pop_front();
    }
    run(next);
  }
}

void SerialQueue::run(Added& next) {
  std::exception_ptr error;
  try {
    next.job(next.done);
  } catch (...) {
    error = std::current_exception();
  }
  if (next.done) next.done(error);
}

}  // namespace sluice
