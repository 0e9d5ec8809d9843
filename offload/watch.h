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

// Ends the transfers of a file whose device does not answer any more: where none has moved a block for as
// long as `patience`, all get an Error(kIo), and later results are ignored. Pages that a device still writes
// to stay allocated to it until then (O_DIRECT), even if they are unmapped here. Thread rule: any thread.
class Watch {
 public:
  explicit Watch(std::chrono::milliseconds patience);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void begun(const std::shared_ptr<Transfer>& transfer);
  void moved(const Transfer& transfer);
  void ended(const Transfer& transfer);
  // Says whether the system still works on transfers that were given up. Waiting for these may take for ever.
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

// Returns what the system call in `call` returns (fdatasync or fallocate, which may hang as their device
// does). Throws Error(kIo) that begins with `what` where there is no answer for as long as `patience`. The
// call runs on a thread of its own, which is then left behind; so `call` must own everything that it uses.
int call_with_patience(std::chrono::milliseconds patience, const std::string& what,
                       std::function<int()> call);

}  // namespace sluice::offload
