#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "core/transfers.h"

namespace sluice {

// A worker thread that runs jobs one after another, in the order in which they were added. Thread rule: any
// thread may call add(), also from a job.
class SerialQueue {
 public:
  // A job gets the Done to call when it has ended. The queue calls it when the job returns or throws; a job
  // that continues asynchronously moves it away and calls it later.
  using Job = std::function<void(Done& done)>;

  SerialQueue();
  ~SerialQueue();  // runs the jobs that were added
  SerialQueue(const SerialQueue&) = delete;
  SerialQueue& operator=(const SerialQueue&) = delete;
  void add(Job job, Done done = nullptr);

 private:
  struct Added {
    Job job;
    Done done;
  };
  void work();
  static void run(Added& next);

  std::mutex mutex_;  // guards the following members
  std::condition_variable changed_;
  std::deque<Added> jobs_;
  bool ends_ = false;
  std::thread thread_;  // last, since it uses the rest
};

}  // namespace sluice
