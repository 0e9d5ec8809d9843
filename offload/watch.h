#pragma once
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "offload/transfer.h"

namespace sluice::offload {

// A watchdog for devices that stop responding: where no transfer of a file has moved a block for `patience`,
// all of them end with an Error(kIo), and later results are ignored. The kernel keeps the pages of such a
// transfer (O_DIRECT) while the device may still write to them, even if they are unmapped here. Thread rule:
// any thread.
class Watch {
 public:
  explicit Watch(std::chrono::milliseconds patience);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void begun(const std::shared_ptr<Transfer>& transfer);
  void moved(const Transfer& transfer);
  void ended(const Transfer& transfer);
  // Returns whether the kernel still works on transfers that were given up. Waiting for them may take for
  // ever.
  bool waits_for_system() const;
  std::chrono::milliseconds patience() const { return patience_; }

 private:
  struct OfFile {
    int idle_looks = 0;
    std::vector<std::shared_ptr<Transfer>> transfers;
  };
  void work();
  std::vector<std::shared_ptr<Transfer>> take_stuck();
  void give_up(const std::vector<std::shared_ptr<Transfer>>& stuck);

  const std::chrono::milliseconds patience_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<const OpenTransfers*, OfFile> files_;
  std::vector<std::weak_ptr<Transfer>> given_up_;
  bool stopping_ = false;
  std::thread thread_;
};

// Makes the system call in `call` (fdatasync or fallocate, which hang where their device does) and returns
// its result. Throws Error(kIo), with a text that begins with `what`, where it takes longer than `patience`.
// The call runs on a thread of its own, which is then left behind; so `call` must own everything that it
// uses.
int call_with_patience(std::chrono::milliseconds patience, const std::string& what,
                       std::function<int()> call);

}  // namespace sluice::offload
