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

// Ends transfers of a file whose device does not answer any more: where none of them has moved a block for as
// long as `patience`, all get an Error(kIo). What the system still does with them comes later and is ignored;
// pages that a device writes to stay its own until then (O_DIRECT), whoever has unmapped them.
// Thread rule: any thread.
class Watch {
 public:
  explicit Watch(std::chrono::milliseconds patience);
  ~Watch();
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void begun(const std::shared_ptr<Transfer>& transfer);
  void moved(const Transfer& transfer);
  void ended(const Transfer& transfer);
  // Whether the system still has transfers that were given up: then whoever waits for it may wait for ever.
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

// What a system call returns that may hang as its device does (fdatasync, fallocate), or Error(kIo) with
// `what` where there is no answer for as long as `patience`. The call is on a thread of its own, which is
// then left behind with what `call` owns: nothing else may be in it.
int call_with_patience(std::chrono::milliseconds patience, const std::string& what,
                       std::function<int()> call);

}  // namespace sluice::offload
