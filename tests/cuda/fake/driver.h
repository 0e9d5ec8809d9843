#pragma once
#include <cuda.h>
#include <fmt/core.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "cuda/fake/control.h"
#include "cuda/fake/memory.h"
#include "cuda/fake/work.h"

namespace sluice::fake_cuda {

struct Kernel;

// The driver, whose functions are in functions.cc: each of them is one call().
class FakeDriver final : public Control {
 public:
  FakeDriver() { begin({}); }

  void begin(const Settings& settings) override;
  void fail(const std::string& function, std::uint64_t n, int result) override;
  void fail_device(int device, std::uint64_t n, int result) override;
  void leave_out(const LeftOut& what) override;
  void capture_default(bool begins) override;
  std::uint64_t left_out() override;
  std::vector<std::string> take_misuses() override;
  std::vector<std::string> alive() override;
  Counts counts() override;
  bool shares_memory() override;
  std::uint64_t memory_taken() override;

  // Begins and ends each call of the driver. `body` throws Refusal.
  template <class Body>
  CUresult call(const char* function, bool needs_context, Body body) {
    if (is_in_host_function_) {  // the thread that runs it has the lock, and waits
      misuses_.push_back(fmt::format("{}: a function of the host's that a stream runs calls CUDA", function));
      return CUDA_ERROR_NOT_PERMITTED;
    }
    std::unique_lock lock(mutex_);
    try {
      const std::uint64_t before = counts_.calls[function]++;
      if (std::string_view(function).ends_with("Synchronize")) ++counts_.waits[std::this_thread::get_id()];
      const auto failure = failures_.find(function);
      if (failure != failures_.end() && failure->second.first == before)
        throw Refusal{failure->second.second, {}};
      if (function != std::string_view("cuInit")) {
        if (process_ == 0) throw Refusal{CUDA_ERROR_NOT_INITIALIZED, "a call comes before cuInit"};
        if (process_ != ::getpid()) throw Refusal{CUDA_ERROR_NOT_INITIALIZED, "a forked child calls"};
      }
      if (needs_context && (contexts_.empty() || retained_ == 0))
        throw Refusal{CUDA_ERROR_INVALID_CONTEXT, "no context is current"};
      work_->captures().refuse_unsafe(function);
      if (needs_context) ++own_counts().calls[function];
      if (needs_context && !ends(function)) refuse_after_a_fault(contexts_.back());
      unless_ranks_are_waited_for(lock, [&] { work_->turn(); });
      unless_ranks_are_waited_for(lock, body);
      unless_ranks_are_waited_for(lock, [&] { work_->turn(); });
      return CUDA_SUCCESS;
    } catch (const Refusal& refusal) {
      if (!refusal.misuse.empty()) misuses_.push_back(fmt::format("{}: {}", function, refusal.misuse));
      return refusal.result;
    }
  }
  template <class Body>
  CUresult call_in_context(const char* function, Body body) {
    return call(function, true, body);
  }

  void remember(std::string misuse) { misuses_.push_back(std::move(misuse)); }
  // A call that does none of the device's work, and so waits for no other rank.
  template <class Body>
  CUresult call_beside(const char* function, Body body) {
    const std::lock_guard lock(mutex_);
    try {
      const std::uint64_t before = counts_.calls[function]++;
      const auto failure = failures_.find(function);
      if (failure != failures_.end() && failure->second.first == before)
        throw Refusal{failure->second.second, {}};
      body();
      return CUDA_SUCCESS;
    } catch (const Refusal& refusal) {
      if (!refusal.misuse.empty()) misuses_.push_back(fmt::format("{}: {}", function, refusal.misuse));
      return refusal.result;
    }
  }
  // Does work that other ranks wait for, which a GPU does between calls, too.
  void serve_ranks();

  // Functions of the driver call these within call().
  void copy(CUstream stream, CUdeviceptr device, std::byte* host, std::size_t bytes, bool is_in);
  void copy_within(CUstream stream, CUdeviceptr to, CUdeviceptr from, std::size_t bytes);
  void fill(CUstream stream, CUdeviceptr to, unsigned char value, std::size_t bytes);
  void run_on_host(CUstream stream, CUhostFn function, void* argument);
  void launch(CUstream stream, CUfunction function, unsigned blocks, unsigned threads, void** arguments);
  void account();  // what the driver takes itself, after its contexts or modules have changed
  void unmap(CUdeviceptr address, std::size_t bytes);
  void unregister_host(void* memory);
  int attribute(CUdevice_attribute what) const;
  void expect_device(CUdevice device) const;
  bool reaches(CUdevice device, CUdeviceptr imported) const;
  static CUcontext context_of(CUdevice device) {
    return reinterpret_cast<CUcontext>(kFirstContext + static_cast<unsigned>(device));
  }

  static inline thread_local std::vector<CUcontext> contexts_;  // of this thread, the current one last
  Settings settings_;
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<Work> work_;
  pid_t process_ = 0;
  std::size_t retained_ = 0, modules_ = 0;
  std::vector<std::unique_ptr<int>> made_contexts_;  // beside the primary one

  int nccl_communicators_ = 0;
  // Of the device in whose context the thread calls. REQUIRES: there is one.
  Counts::OfDevice& own_counts() { return counts_.of_devices[device_of(contexts_.back())]; }

 private:
  static constexpr std::uint64_t kFirstContext = 0x1000;
  // Repeats the action, which has done nothing where it finds that it waits for other ranks.
  template <class Action>
  static void unless_ranks_are_waited_for(std::unique_lock<std::mutex>& lock, const Action& action) {
    for (;;) {
      try {
        return action();
      } catch (const WaitsForRanks&) {
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        lock.lock();
      }
    }
  }
  int device_of(CUcontext context) const;
  std::uint64_t read_of_others(const Kernel& kernel, const void* arguments) const;
  void refuse_after_a_fault(CUcontext context);
  static bool ends(std::string_view function);

  static inline thread_local bool is_in_host_function_ = false;
  std::mt19937_64 random_;
  std::mutex mutex_;
  Counts counts_;
  std::vector<std::string> misuses_;
  std::map<std::string, std::pair<std::uint64_t, CUresult>> failures_;
  std::map<CUcontext, std::pair<std::uint64_t, CUresult>> faults_;  // after how many more calls
};

FakeDriver& fake();

}  // namespace sluice::fake_cuda
