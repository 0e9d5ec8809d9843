#include <cuda.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>

#include "core/cuda/driver.h"
#include "cuda/fake/control.h"
#include "cuda/fake/fibers.h"
#include "cuda/fake/memory.h"
#include "cuda/fake/work.h"

// The functions of the driver that Sluice calls, without a GPU: see control.h.
namespace sluice::fake_cuda {
namespace {

thread_local std::vector<CUcontext> contexts;  // of this thread, the current one last
thread_local bool is_in_host_function = false;
thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;  // of this thread

// What is safe while a client captures. The first launch of a kernel may load it, so that launches are not.
bool is_safe(std::string_view function) {
  static constexpr std::string_view kSafe[] = {"cuInit",
                                               "cuCtxGetCurrent",
                                               "cuCtxPushCurrent",
                                               "cuCtxPopCurrent",
                                               "cuCtxGetStreamPriorityRange",
                                               "cuMemGetAllocationGranularity",
                                               "cuStreamIsCapturing",
                                               "cuStreamWaitEvent",
                                               "cuEventRecord",
                                               "cuMemsetD8Async",
                                               "cuLaunchHostFunc",
                                               "cuThreadExchangeStreamCaptureMode"};
  const auto begins = [&](std::string_view with) { return function.starts_with(with); };
  return begins("cuDeviceGet") || begins("cuDeviceTotal") || begins("cuMemcpy") ||
         begins("cuStreamBeginCapture") || begins("cuStreamEndCapture") || begins("cuGraph") ||
         std::ranges::count(kSafe, function) > 0;
}

class FakeDriver final : public Control {
 public:
  FakeDriver() { begin({}); }

  void begin(const Settings& settings) override {
    const std::lock_guard lock(mutex_);
    settings_ = settings;
    memory_ = std::make_unique<Memory>(settings.memory, settings.shares_memory);
    work_ = std::make_unique<Work>(settings);
    counts_ = {};
    misuses_.clear();
    failures_.clear();
    random_.seed(settings.seed);
    process_ = 0;
    retained_ = 0;
    modules_ = 0;
    made_contexts_.clear();
    account();
  }
  void fail(const std::string& function, std::uint64_t n, int result) override {
    const std::lock_guard lock(mutex_);
    failures_[function] = {counts_.calls[function] + n, static_cast<CUresult>(result)};
  }
  void leave_out(const LeftOut& what) override {
    const std::lock_guard lock(mutex_);
    work_->leave_out(what);
  }
  void capture_default(bool begins) override {
    const std::lock_guard lock(mutex_);
    try {
      if (begins)
        work_->begin_capture(CU_STREAM_LEGACY, CU_STREAM_CAPTURE_MODE_GLOBAL);
      else
        work_->end_capture(CU_STREAM_LEGACY);
    } catch (const Refusal& refusal) {
      misuses_.push_back(refusal.misuse.empty() ? "a capture was ended by what is not part of it"
                                                : refusal.misuse);
    }
  }
  std::uint64_t left_out() override {
    const std::lock_guard lock(mutex_);
    return work_->left_out();
  }
  std::vector<std::string> take_misuses() override {
    const std::lock_guard lock(mutex_);
    return std::exchange(misuses_, {});
  }
  std::vector<std::string> alive() override {
    const std::lock_guard lock(mutex_);
    std::vector<std::string> texts;
    const auto add = [&](std::size_t count, const char* what) {
      if (count > 0) texts.push_back(fmt::format("{} {}", count, what));
    };
    add(memory_->extents(), "extents");
    add(memory_->reservations(), "reservations");
    add(memory_->mappings(), "mappings");
    add(memory_->registrations(), "registrations");
    add(work_->streams(), "streams");
    add(work_->events(), "events");
    add(modules_, "modules");
    add(retained_, "uses of the context");
    add(made_contexts_.size(), "contexts");
    return texts;
  }
  Counts counts() override {
    const std::lock_guard lock(mutex_);
    return counts_;
  }
  bool shares_memory() override {
    const std::lock_guard lock(mutex_);
    return settings_.shares_memory;
  }
  std::uint64_t memory_taken() override {
    const std::lock_guard lock(mutex_);
    return memory_->taken();
  }

  // What every call does first and last. `body` throws Refusal.
  template <class Body>
  CUresult call(const char* function, bool needs_context, Body body) {
    if (is_in_host_function) {  // the thread that runs it has the lock, and waits
      misuses_.push_back(fmt::format("{}: a function of the host's that a stream runs calls CUDA", function));
      return CUDA_ERROR_NOT_PERMITTED;
    }
    const std::lock_guard lock(mutex_);
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
      if (needs_context && (contexts.empty() || retained_ == 0))
        throw Refusal{CUDA_ERROR_INVALID_CONTEXT, "no context is current"};
      if (!is_safe(function)) work_->refuse_unsafe(capture_mode);
      work_->turn();
      body();
      work_->turn();
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

  // What work does when its turn comes. Where it was queued in order, and memory has gone since, the device
  // has a fault.
  void copy(CUstream stream, CUdeviceptr device, std::byte* host, std::size_t bytes, bool is_in) {
    if (is_in)
      memory_->expect_writable(device, bytes);
    else
      memory_->expect_mapped(device, bytes);
    memory_->expect_registered(host, bytes);
    const auto begin = reinterpret_cast<std::uint64_t>(host);
    work_->queue(stream, {{device, device + bytes, false}, {begin, begin + bytes, true}},
                 [this, device, host, bytes, is_in] {
                   memory_->expect_registered(host, bytes);
                   std::byte* now = host;
                   memory_->pieces(device, bytes, [&](std::byte* seen, std::size_t size) {
                     if (is_in)
                       std::memcpy(seen, now, size);
                     else
                       std::memcpy(now, seen, size);
                     now += size;
                   });
                 });
    (is_in ? counts_.bytes_in : counts_.bytes_out) += bytes;
    if (is_in) ++counts_.copied_to[device], ++counts_.copied_from[begin];
  }
  void copy_within(CUstream stream, CUdeviceptr to, CUdeviceptr from, std::size_t bytes) {
    memory_->expect_writable(to, bytes);
    memory_->expect_mapped(from, bytes);
    work_->queue(stream, {{to, to + bytes, false}, {from, from + bytes, false}}, [this, to, from, bytes] {
      std::vector<std::byte> values;
      memory_->pieces(from, bytes, [&](const std::byte* seen, std::size_t size) {
        values.insert(values.end(), seen, seen + size);
      });
      const std::byte* now = values.data();
      memory_->pieces(to, bytes, [&](std::byte* seen, std::size_t size) {
        std::memcpy(seen, now, size);
        now += size;
      });
    });
    counts_.bytes_within += bytes;
  }
  void fill(CUstream stream, CUdeviceptr to, unsigned char value, std::size_t bytes) {
    memory_->expect_writable(to, bytes);
    work_->queue(stream, {{to, to + bytes, false}}, [this, to, value, bytes] {
      memory_->pieces(to, bytes, [&](std::byte* seen, std::size_t size) { std::memset(seen, value, size); });
    });
  }
  void run_on_host(CUstream stream, CUhostFn function, void* argument) {
    work_->queue(stream, {}, [function, argument] {
      std::thread([&] {
        is_in_host_function = true;
        function(argument);
      }).join();
    });
  }
  void launch(CUstream stream, CUfunction function, unsigned blocks, unsigned threads, void** arguments) {
    const Kernel& kernel = *reinterpret_cast<const Kernel*>(function);
    if (blocks == 0 || threads == 0 || threads > 1024)
      throw Refusal{CUDA_ERROR_INVALID_VALUE,
                    fmt::format("a kernel is given {} blocks of {} threads", blocks, threads)};
    const auto* const first = static_cast<const std::byte*>(arguments[0]);
    // Which memory a kernel uses is not known, so none may go while it is queued.
    work_->queue(stream, {{0, UINT64_MAX, false}},
                 [this, &kernel, blocks, threads,
                  copy = std::vector<std::byte>(first, first + kernel.argument_bytes)] {
                   const Memory::Open open(*memory_);
                   run_kernel(kernel, blocks, threads, copy.data(), random_);
                 });
  }
  // Counts what the driver takes itself, after its contexts or modules have changed.
  void account() {
    const std::size_t all = made_contexts_.size() + (retained_ > 0 ? 1 : 0);
    memory_->take_besides(all * settings_.context_memory + modules_ * settings_.module_memory);
  }
  void unmap(CUdeviceptr address, std::size_t bytes) {
    if (work_->uses(address, address + bytes, false))
      throw Refusal{CUDA_ERROR_ILLEGAL_ADDRESS,
                    fmt::format("{:#x} is unmapped, and queued work uses it", address)};
    memory_->unmap(address, bytes);
  }
  void unregister_host(void* memory) {
    const auto begin = reinterpret_cast<std::uint64_t>(memory);
    if (work_->uses(begin, begin + 1, true))
      throw Refusal{CUDA_ERROR_INVALID_VALUE, "host memory is unregistered, and queued work uses it"};
    memory_->unregister_host(memory);
  }
  int attribute(CUdevice_attribute what) const {
    switch (what) {
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        return settings_.major;
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        return 0;
      case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        return 4;
      case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        return 2;
      case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
        return settings_.has_virtual_memory ? 1 : 0;
      case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
        return settings_.compute_mode;
      default:
        throw Refusal{CUDA_ERROR_INVALID_VALUE,
                      fmt::format("attribute {} is not known here", static_cast<int>(what))};
    }
  }
  void expect_device(CUdevice device) const {
    if (device < 0 || device >= settings_.devices)
      throw Refusal{CUDA_ERROR_INVALID_DEVICE, "there is no such device"};
  }
  CUcontext context_of(CUdevice device) {
    return reinterpret_cast<CUcontext>(std::uint64_t{0x1000} + static_cast<unsigned>(device));
  }

  Settings settings_;
  std::unique_ptr<Memory> memory_;
  std::unique_ptr<Work> work_;
  pid_t process_ = 0;
  std::size_t retained_ = 0, modules_ = 0;
  std::vector<std::unique_ptr<int>> made_contexts_;  // beside the primary one

 private:
  std::mt19937_64 random_;
  std::mutex mutex_;
  Counts counts_;
  std::vector<std::string> misuses_;
  std::map<std::string, std::pair<std::uint64_t, CUresult>> failures_;
};

FakeDriver& fake() {
  static FakeDriver driver;
  return driver;
}

}  // namespace
}  // namespace sluice::fake_cuda

using sluice::fake_cuda::contexts;
using sluice::fake_cuda::fake;
using sluice::fake_cuda::Refusal;

sluice::fake_cuda::Control* sluice_fake_cuda() { return &fake(); }

extern "C" {

CUresult cuInit(unsigned) {
  return fake().call("cuInit", false, [] {
    if (fake().settings_.devices == 0) throw Refusal{CUDA_ERROR_NO_DEVICE, {}};
    fake().process_ = ::getpid();
  });
}
CUresult cuDriverGetVersion(int* version) {  // may be called before cuInit
  *version = fake().settings_.driver;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult result, const char** text) {
  switch (result) {
#define SLUICE_NAME(name) \
  case name:              \
    *text = #name;        \
    return CUDA_SUCCESS;
    SLUICE_NAME(CUDA_ERROR_INVALID_VALUE)
    SLUICE_NAME(CUDA_ERROR_OUT_OF_MEMORY)
    SLUICE_NAME(CUDA_ERROR_NOT_INITIALIZED)
    SLUICE_NAME(CUDA_ERROR_NO_DEVICE)
    SLUICE_NAME(CUDA_ERROR_ILLEGAL_ADDRESS)
    SLUICE_NAME(CUDA_ERROR_INVALID_HANDLE)
    SLUICE_NAME(CUDA_ERROR_UNKNOWN)
#undef SLUICE_NAME
    default:
      *text = nullptr;
      return CUDA_ERROR_INVALID_VALUE;
  }
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "as the fake driver says";
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) {
  return fake().call("cuDeviceGetCount", false, [&] { *count = fake().settings_.devices; });
}
CUresult cuDeviceGet(CUdevice* device, int index) {
  return fake().call("cuDeviceGet", false, [&] {
    fake().expect_device(index);
    *device = index;
  });
}
CUresult cuDeviceGetName(char* name, int size, CUdevice device) {
  return fake().call("cuDeviceGetName", false, [&] {
    fake().expect_device(device);
    std::snprintf(name, static_cast<std::size_t>(size), "fake GPU");
  });
}
CUresult cuDeviceGetPCIBusId(char* text, int size, CUdevice device) {
  return fake().call("cuDeviceGetPCIBusId", false, [&] {
    fake().expect_device(device);
    std::snprintf(text, static_cast<std::size_t>(size), "0000:%02X:00.0", 0x1B + device);  // as drivers do
  });
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute what, CUdevice device) {
  return fake().call("cuDeviceGetAttribute", false, [&] {
    fake().expect_device(device);
    *value = fake().attribute(what);
  });
}
CUresult cuDeviceTotalMem(std::size_t* bytes, CUdevice device) {
  return fake().call("cuDeviceTotalMem", false, [&] {
    fake().expect_device(device);
    *bytes = fake().settings_.memory;
  });
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return fake().call("cuDevicePrimaryCtxRetain", false, [&] {
    fake().expect_device(device);
    if (fake().settings_.is_busy) throw Refusal{CUDA_ERROR_DEVICE_UNAVAILABLE, {}};
    *context = fake().context_of(device);
    ++fake().retained_;
    fake().account();
  });
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
  return fake().call("cuDevicePrimaryCtxRelease", false, [&] {
    fake().expect_device(device);
    if (fake().retained_ == 0)
      throw Refusal{CUDA_ERROR_INVALID_CONTEXT, "a context is released once too often"};
    --fake().retained_;
    fake().account();
  });
}
CUresult cuCtxCreate(CUcontext* context, CUctxCreateParams*, unsigned, CUdevice device) {
  return fake().call("cuCtxCreate", false, [&] {
    fake().expect_device(device);
    fake().made_contexts_.push_back(std::make_unique<int>(device));
    *context = reinterpret_cast<CUcontext>(fake().made_contexts_.back().get());
    contexts.push_back(*context);
    fake().account();
  });
}
CUresult cuCtxDestroy(CUcontext context) {
  return fake().call("cuCtxDestroy", false, [&] {
    const auto is_it = [&](const auto& made) { return reinterpret_cast<CUcontext>(made.get()) == context; };
    if (std::erase_if(fake().made_contexts_, is_it) == 0)
      throw Refusal{CUDA_ERROR_INVALID_CONTEXT, "a context ends that nobody has made"};
    if (!contexts.empty() && contexts.back() == context) contexts.pop_back();
    fake().account();
  });
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  return fake().call("cuCtxGetCurrent", false,
                     [&] { *context = contexts.empty() ? nullptr : contexts.back(); });
}
CUresult cuCtxPushCurrent(CUcontext context) {
  return fake().call("cuCtxPushCurrent", false, [&] { contexts.push_back(context); });
}
CUresult cuCtxPopCurrent(CUcontext* context) {
  return fake().call("cuCtxPopCurrent", false, [&] {
    if (contexts.empty())
      throw Refusal{CUDA_ERROR_INVALID_CONTEXT, "a context is popped, and none is current"};
    *context = contexts.back();
    contexts.pop_back();
  });
}
CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return fake().call_in_context("cuCtxGetStreamPriorityRange", [&] { *least = 0, *greatest = -5; });
}

CUresult cuMemGetInfo(std::size_t* free, std::size_t* total) {
  return fake().call_in_context("cuMemGetInfo", [&] {
    *free = fake().memory_->free_bytes();
    *total = fake().settings_.memory;
  });
}
CUresult cuMemGetAllocationGranularity(std::size_t* bytes, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  return fake().call("cuMemGetAllocationGranularity", false,
                     [&] { *bytes = sluice::fake_cuda::kGranularity; });
}
CUresult cuMemAddressReserve(CUdeviceptr* address, std::size_t bytes, std::size_t, CUdeviceptr,
                             unsigned long long) {
  return fake().call_in_context("cuMemAddressReserve", [&] { *address = fake().memory_->reserve(bytes); });
}
CUresult cuMemAddressFree(CUdeviceptr address, std::size_t bytes) {
  return fake().call_in_context("cuMemAddressFree", [&] { fake().memory_->free(address, bytes); });
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                     const CUmemAllocationProp* properties, unsigned long long) {
  return fake().call_in_context("cuMemCreate", [&] {
    if (properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
      throw Refusal{CUDA_ERROR_INVALID_VALUE, "memory is made that is not the device's"};
    fake().expect_device(properties->location.id);
    *handle = fake().memory_->create(bytes);
  });
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return fake().call_in_context("cuMemRelease", [&] { fake().memory_->release(handle); });
}
CUresult cuMemMap(CUdeviceptr address, std::size_t bytes, std::size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  return fake().call_in_context("cuMemMap", [&] {
    if (offset != 0 || flags != 0)
      throw Refusal{CUDA_ERROR_INVALID_VALUE, "an extent is mapped in part, or with flags"};
    fake().memory_->map(address, bytes, handle);
  });
}
CUresult cuMemUnmap(CUdeviceptr address, std::size_t bytes) {
  return fake().call_in_context("cuMemUnmap", [&] { fake().unmap(address, bytes); });
}
CUresult cuMemSetAccess(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc* access,
                        std::size_t count) {
  return fake().call_in_context("cuMemSetAccess", [&] {
    const bool writes = access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (count != 1 || (!writes && access->flags != CU_MEM_ACCESS_FLAGS_PROT_READ))
      throw Refusal{CUDA_ERROR_INVALID_VALUE, "access is given that is not one device's to read"};
    if (!writes && !fake().settings_.has_read_only) throw Refusal{CUDA_ERROR_NOT_SUPPORTED, {}};
    fake().expect_device(access->location.id);
    fake().memory_->allow(address, bytes, writes);
  });
}
CUresult cuMemHostRegister(void* memory, std::size_t bytes, unsigned) {
  return fake().call_in_context("cuMemHostRegister", [&] { fake().memory_->register_host(memory, bytes); });
}
CUresult cuMemHostUnregister(void* memory) {
  return fake().call_in_context("cuMemHostUnregister", [&] { fake().unregister_host(memory); });
}

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int) {
  return fake().call_in_context("cuStreamCreateWithPriority", [&] {
    if (flags != CU_STREAM_NON_BLOCKING)
      throw Refusal{CUDA_ERROR_INVALID_VALUE, "a stream is made that waits for the default one"};
    *stream = fake().work_->make_stream();
  });
}
CUresult cuStreamDestroy(CUstream stream) {
  return fake().call_in_context("cuStreamDestroy", [&] { fake().work_->end(stream); });
}
CUresult cuStreamSynchronize(CUstream stream) {
  return fake().call_in_context("cuStreamSynchronize", [&] { fake().work_->finish(stream); });
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  return fake().call_in_context("cuStreamWaitEvent", [&] { fake().work_->wait(stream, event); });
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return fake().call_in_context("cuStreamIsCapturing",
                                [&] { *status = fake().work_->capture_status(stream); });
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return fake().call("cuThreadExchangeStreamCaptureMode", false, [&] {
    if (!fake().work_->leaves_out("cuThreadExchangeStreamCaptureMode", 0))
      std::swap(*mode, sluice::fake_cuda::capture_mode);
  });
}
// What tests call, who stand for clients. Nothing of a client's is captured, so that each graph is empty.
CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  return fake().call_in_context("cuStreamBeginCapture", [&] { fake().work_->begin_capture(stream, mode); });
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  return fake().call_in_context("cuStreamEndCapture", [&] {
    *graph = nullptr;
    fake().work_->end_capture(stream);
    *graph = reinterpret_cast<CUgraph>(std::uint64_t{1});
  });
}
CUresult cuGraphGetNodes(CUgraph, CUgraphNode*, std::size_t* count) {
  return fake().call("cuGraphGetNodes", false, [&] { *count = 0; });
}
CUresult cuGraphDestroy(CUgraph) {
  return fake().call("cuGraphDestroy", false, [] {});
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  return fake().call_in_context(
      "cuEventCreate", [&] { *event = fake().work_->make_event((flags & CU_EVENT_DISABLE_TIMING) == 0); });
}
CUresult cuEventDestroy(CUevent event) {
  return fake().call_in_context("cuEventDestroy", [&] { fake().work_->end(event); });
}
CUresult cuEventRecord(CUevent event, CUstream stream) {
  return fake().call_in_context("cuEventRecord", [&] { fake().work_->record(event, stream); });
}
CUresult cuEventQuery(CUevent event) {
  return fake().call_in_context("cuEventQuery", [&] {
    if (!fake().work_->query(event)) throw Refusal{CUDA_ERROR_NOT_READY, {}};
  });
}
CUresult cuEventSynchronize(CUevent event) {
  return fake().call_in_context("cuEventSynchronize", [&] { fake().work_->finish(event); });
}
CUresult cuEventElapsedTime(float* milliseconds, CUevent first, CUevent second) {
  return fake().call_in_context("cuEventElapsedTime", [&] {
    *milliseconds = static_cast<float>(fake().work_->milliseconds_between(first, second));
  });
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, std::size_t bytes, CUstream stream) {
  return fake().call_in_context("cuMemcpyHtoDAsync", [&] {
    fake().copy(stream, to, static_cast<std::byte*>(const_cast<void*>(from)), bytes, true);
  });
}
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  return fake().call_in_context(
      "cuMemcpyDtoHAsync", [&] { fake().copy(stream, from, static_cast<std::byte*>(to), bytes, false); });
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  return fake().call_in_context("cuMemcpyDtoDAsync", [&] { fake().copy_within(stream, to, from, bytes); });
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t bytes, CUstream stream) {
  return fake().call_in_context("cuMemsetD8Async", [&] { fake().fill(stream, to, value, bytes); });
}
CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* argument) {
  return fake().call_in_context("cuLaunchHostFunc", [&] { fake().run_on_host(stream, function, argument); });
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {  // the kernels are those of this library
  return fake().call_in_context("cuModuleLoadData", [&] {
    if (image == nullptr) throw Refusal{CUDA_ERROR_INVALID_IMAGE, "a module is made of nothing"};
    *module = reinterpret_cast<CUmodule>(++fake().modules_);
    fake().account();
  });
}
CUresult cuModuleUnload(CUmodule) {
  return fake().call_in_context("cuModuleUnload", [&] {
    if (fake().modules_ == 0) throw Refusal{CUDA_ERROR_INVALID_HANDLE, "a module ends that there is not"};
    --fake().modules_;
    fake().account();
  });
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  return fake().call_in_context("cuModuleGetFunction", [&] {
    const auto* const kernel = sluice::fake_cuda::find_kernel(name);
    if (kernel == nullptr) throw Refusal{CUDA_ERROR_NOT_FOUND, {}};
    *function = reinterpret_cast<CUfunction>(const_cast<sluice::fake_cuda::Kernel*>(kernel));
  });
}
CUresult cuLaunchKernel(CUfunction kernel, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned,
                        unsigned, unsigned, CUstream stream, void** arguments, void**) {
  return fake().call_in_context("cuLaunchKernel",
                                [&] { fake().launch(stream, kernel, blocks, threads, arguments); });
}

CUresult cuGetProcAddress(const char* name, void** address, int version, cuuint64_t,
                          CUdriverProcAddressQueryResult* status) {
  *address = nullptr;
  if (version <= fake().settings_.driver) {
#define SLUICE_FIND(function) \
  if (name == std::string_view(#function)) *address = reinterpret_cast<void*>(&::function);
    SLUICE_CUDA_FUNCTIONS(SLUICE_FIND)
#undef SLUICE_FIND
  }
  *status = *address == nullptr ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
  return *address == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}
}
