#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <thread>
#include <vector>

// Tests control the fake driver (libsluice_fake_cuda.so) by this: a driver without a GPU, strict and
// adversarial.
//
// It does a device's work inside driver calls alone, on the caller's thread, in an order that a schedule
// chooses among those that CUDA allows. Between calls nobody can touch the device's memory: a touch by the
// CPU is a fault. Memory begins as NaN. Each misuse is refused with CUDA's error, and is also remembered,
// because a caller might not look at the error. A host function runs on a thread of its own while the call
// that runs it waits; it must not wait for that caller.
//
// The library is also a fake of NCCL, as far as Sluice uses it ($SLUICE_NCCL): messages between ranks, which
// are threads or processes of one machine. Where the two ends of a message differ in size, both wait for
// ever, as with the real one, and it is a misuse, too.
//
// It can also share the device's memory with the CPU, for clients whose own work is the CPU's, such as
// PyTorch without CUDA: see Settings::shares_memory.
namespace sluice::fake_cuda {

enum class Schedule {
  kEarly,  // all work is done as soon as it may be
  kLate,   // none is done before somebody waits for it, and then no more than that needs
  kRandom  // at each call some of it is done, as a seed says
};

struct Settings {
  Schedule schedule = Schedule::kEarly;
  std::uint64_t seed = 0;
  std::size_t memory = std::size_t{1} << 30;  // of the device
  // Each context, and each module, takes so much of the device's memory.
  std::size_t context_memory = 0, module_memory = 0;
  int devices = 1;
  int driver = 13000;
  int major = 9;                   // of the compute capability
  bool has_virtual_memory = true;  // whether it can map memory where the caller wants it
  int compute_mode = 0;            // as CUcomputemode
  bool is_busy = false;            // whether another process has the device for itself
  bool has_peers = true;           // whether it reaches the memory of other processes' devices
  int nccl = 22809;                // version of NCCL that this library is, too
  std::size_t nccl_memory = 0;     // what each communicator of NCCL takes of a device
  int peers = 8;                   // which do: the first so many each other's, the next so many, and so on
  // Whether the CPU may use the device's memory, where it is mapped, also between calls. The default stream
  // is then what the CPU does: whatever is queued there is done before its call returns. Host memory counts
  // as the device's, too. All other streams are as adversarial as ever.
  bool shares_memory = false;
};

struct Counts {
  std::map<std::string, std::uint64_t> calls;  // by function
  // Calls with which a thread waits for the device: cuEventSynchronize and cuStreamSynchronize.
  std::map<std::thread::id, std::uint64_t> waits;
  std::uint64_t bytes_in = 0, bytes_out = 0, bytes_within = 0;
  struct OfDevice {
    std::map<std::string, std::uint64_t> calls;  // in its context, by function
    // How much its copies, and its kernels, read of memory that another rank has made.
    std::uint64_t bytes_copied = 0, bytes_added = 0;
    std::uint64_t bytes_sent = 0, bytes_received = 0;  // by NCCL
  };
  std::map<int, OfDevice> of_devices;
};

// A wait that is left out: the driver says that it has done it, and has not. So tests can show that they
// would find a wait that somebody forgot. Streams are counted from 0, in the order in which they were made.
struct LeftOut {
  // cuStreamWaitEvent, cuEventRecord, cuEventSynchronize or cuStreamSynchronize; cuEventQuery, which then
  // says that the event is done; or cuThreadExchangeStreamCaptureMode, which has no stream.
  std::string function;
  int stream = 0;    // that waits, that is waited for by the caller, or on which an event is recorded
  int awaited = -1;  // of cuStreamWaitEvent: on which the event was recorded
};

class Control {
 public:
  virtual ~Control() = default;
  // Begins anew, with nothing alive, counted or remembered.
  virtual void begin(const Settings& settings) = 0;
  // The n-th call of a function from now on (0 is the next one) returns this result, and does nothing.
  virtual void fail(const std::string& function, std::uint64_t n, int result) = 0;
  // From the n-th call in this device's context on each returns this result and does nothing, as after a
  // fault of the device, but those that end something. 0 as the result ends the fault.
  virtual void fail_device(int device, std::uint64_t n, int result) = 0;
  virtual void leave_out(const LeftOut& what) = 0;  // until begin()
  // Begins or ends to capture the default stream, which stands for what a client's CPU does where memory is
  // shared, in CUDA's global mode. Other streams are captured by CUDA's own functions. What is queued on a
  // captured stream is a misuse, as is a call that may be unsafe: NVIDIA says by examples which are, so here
  // all are that neither queue work nor ask for what is known without a look at the device.
  virtual void capture_default(bool begins) = 0;
  virtual std::uint64_t left_out() = 0;  // how often something was, since begin()
  virtual std::vector<std::string> take_misuses() = 0;
  virtual std::vector<std::string> alive() = 0;  // what was made and not ended, as in "2 streams"
  virtual Counts counts() = 0;
  virtual std::uint64_t memory_taken() = 0;  // by extents that this process has made, in bytes
  virtual bool shares_memory() = 0;
};

}  // namespace sluice::fake_cuda

extern "C" {
sluice::fake_cuda::Control* sluice_fake_cuda();
// Callers in C or Python use the functions below. The first begins anew with memory that is shared.
// `schedule` is a Schedule by its number. There are so many devices, of which a process uses one. has_peers:
// 1 or 0, or Settings::peers.
void sluice_fake_cuda_share_memory(std::uint64_t memory, int schedule, std::uint64_t seed, int devices,
                                   int has_peers);
int sluice_fake_cuda_shares_memory(void);  // 1 or 0
// Whether the default stream, on which the CPU counts as a client's work, is captured into a graph.
void sluice_fake_cuda_capture(int begins);
// Control::fail().
void sluice_fake_cuda_fail(const char* function, std::uint64_t n, int result);
// Return what was refused since the last call, and what is alive, a line each. Texts are valid until the next
// call.
const char* sluice_fake_cuda_misuses(void);
const char* sluice_fake_cuda_alive(void);
}
