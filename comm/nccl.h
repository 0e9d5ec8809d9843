#pragma once
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>

#include "comm/communicator.h"
#include "core/device.h"

struct ncclComm;

namespace sluice::comm {

struct NcclFunctions;

// Messages between the GPUs of a communicator's ranks, by NVIDIA's NCCL: over NVLink or PCIe within a host,
// and over the network between hosts, without host memory where the hardware allows it. NCCL only carries
// bytes here; sums have Sluice's own order.
//
// The library is loaded where ranks are joined: the file that $SLUICE_NCCL names, else the libnccl.so.2 that
// the process has loaded (PyTorch's), else the one on the loader's path. It is never unloaded.
//
// NCCL's kernels wait on the GPU for those of other ranks. Where the run has failed, a thread of this class
// aborts NCCL, which ends these kernels; what they should have received is then unspecified. Where NCCL
// itself reports an error, the thread fails the run.
class Nccl {
 public:
  // The oldest version that is used, as NCCL's own number: 10000 * major + 100 * minor + patch.
  static constexpr int kOldest = 22000;

  // Collective. Joins the GPUs of all ranks; `communicator` and `device` outlive the object. Returns null, on
  // all ranks alike, where some rank cannot join, with the first one's reason in `problem`. own_problem: why
  // this rank refuses; empty: it does not. id: of the calls. Throws as Communicator::exchange().
  static std::unique_ptr<Nccl> join(Communicator& communicator, std::uint64_t id, Device& device,
                                    const std::string& own_problem, std::string& problem);
  ~Nccl();  // REQUIRES: all queued work is done, unless the run has failed
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  struct Message {
    int rank;             // the other end, which may be this rank itself
    DeviceAddress begin;  // GPU memory
    std::size_t bytes;    // the same at both ends; 0: there is no message
  };
  // Queues messages, all of which travel at the same time. All ranks of messages queue their ends of them in
  // the same order, since NCCL takes one such call after the other. Throws Error(kIo) where NCCL fails, and
  // the failure of the run. Thread rule: one thread at a time.
  void exchange(CUstream_st* stream, std::span<const Message> sent, std::span<const Message> received);
  // Throws the failure of the run, if it has failed. Call it after the wait for what was received.
  void check() const;

 private:
  Nccl(Communicator& communicator, Device& device, const NcclFunctions& functions);
  std::string begin(const std::string& unique_id);
  bool end();
  void watch();
  void abort();
  void expect(int result, const char* call) const;
  void wait_until_ready(const char* call) const;

  Communicator& communicator_;
  Device& device_;
  const std::unique_ptr<const NcclFunctions> functions_;
  std::mutex in_use_;  // held during calls of the library with handle_
  ncclComm* handle_ = nullptr;
  bool is_joined_ = false;  // whether all ranks have
  std::mutex mutex_;        // guards what follows
  std::condition_variable ends_;
  bool is_ending_ = false;
  std::thread watcher_;
};

// The library that Nccl::join() would use in this process, and its version, as "2.28.9". Throws
// Error(kNotFound), with the remedy, where there is none that can be used.
struct NcclLibrary {
  std::string path, version;
};
NcclLibrary find_nccl();

}  // namespace sluice::comm
