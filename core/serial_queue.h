#pragma once
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "core/transfers.h"

namespace sluice {

// A thread that does jobs one after another, in the order in which they were added. Thread rule: add() from
// any thread, a job's included.
class SerialQueue {
 public:
  // Is given what to call when it has ended, with its error where it throws. A job that goes on elsewhere
  // moves that away.
  using Job = std::function<void(Done& done)>;

  SerialQueue();
  ~SerialQueue();  // does the jobs that were added
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

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Added> jobs_;
  bool ends_ = false;
  std::thread thread_;  // last, since it uses the rest
};

}  // namespace sluice
