#include "core/cuda/device.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <new>

#include "core/bytes.h"
#include "core/cuda/kernel_file.h"

namespace sluice::cuda {
namespace {

// Sets CUDA's relaxed stream-capture mode on the calling thread while it lives. In another mode, every call
// that CUDA considers unsafe, such as querying an event, fails while a client captures a graph on any thread,
// and ends that capture. Nothing that is done here belongs to a client's graph.
class Relaxed {
 public:
  explicit Relaxed(const Driver& driver) noexcept
      : driver_(driver), result_(driver.cuThreadExchangeStreamCaptureMode(&mode_)) {}
  ~Relaxed() {
    // This call may return an earlier call's error, and NVIDIA does not document whether it has set the mode
    // then. Setting it once more does no harm. If that fails, too, the thread stays in the relaxed mode, in
    // which CUDA refuses less, and the GPU has had a fault, which each later call reports.
    for (int left = result_ == CUDA_SUCCESS ? 2 : 0; left > 0; --left) {
      CUstreamCaptureMode mode = mode_;
      if (driver_.cuThreadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS) return;
    }
  }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;
  void check() const { driver_.check(result_, "cuThreadExchangeStreamCaptureMode"); }

 private:
  const Driver& driver_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;  // from the first exchange on, the mode before
  const CUresult result_;
};

// The driver context and capture mode for one operation, while it lives.
class InContext {
 public:
  InContext(const Driver& driver, CUcontext context) : driver_(driver), relaxed_(driver) {
    relaxed_.check();
    CUcontext current = nullptr;
    driver_.check(driver_.cuCtxGetCurrent(&current), "cuCtxGetCurrent");
    if (current == context) return;
    driver_.check(driver_.cuCtxPushCurrent(context), "cuCtxPushCurrent");
    is_pushed_ = true;
  }
  // For cleanups, which are tried in any case.
  InContext(const Driver& driver, CUcontext context, std::nothrow_t /*unused*/) noexcept
      : driver_(driver), relaxed_(driver), is_pushed_(driver.cuCtxPushCurrent(context) == CUDA_SUCCESS) {}
  ~InContext() {
    CUcontext popped = nullptr;
    // The driver returns an earlier call's error at each later call, too, and has no reason of its own to
    // refuse this one. If it did, the context would stay current on this thread.
    if (is_pushed_) (void)driver_.cuCtxPopCurrent(&popped);
  }
  InContext(const InContext&) = delete;
  InContext& operator=(const InContext&) = delete;

 private:
  const Driver& driver_;
  const Relaxed relaxed_;
  bool is_pushed_ = false;
};

// Another context, current while it lives, with a module in it.
class OneMoreContext {
 public:
  OneMoreContext(const Driver& driver, CUdevice device, const KernelFile& kernels) : driver_(driver) {
    const CUresult made = driver.cuCtxCreate(&context_, nullptr, 0, device);
    require_room(made);
    driver.check(made, "cuCtxCreate");
    const CUresult loaded = driver.cuModuleLoadData(&module_, kernels.image.data());
    if (loaded == CUDA_SUCCESS) return;
    (void)driver.cuCtxDestroy(context_);
    require_room(loaded);
    check_loaded(driver, loaded, kernels);
  }
  ~OneMoreContext() {
    (void)driver_.cuModuleUnload(module_);
    (void)driver_.cuCtxDestroy(context_);
  }
  OneMoreContext(const OneMoreContext&) = delete;
  OneMoreContext& operator=(const OneMoreContext&) = delete;

 private:
  static void require_room(CUresult result) {
    if (result == CUDA_ERROR_OUT_OF_MEMORY || result == CUDA_ERROR_DEVICE_UNAVAILABLE)
      fail(ErrorCode::kBudget,
           "the GPU has no room for one more context, or allows none (compute mode \"exclusive process\")");
  }
  const Driver& driver_;
  CUcontext context_ = nullptr;
  CUmodule module_ = nullptr;
};

std::size_t free_in_current(const Driver& driver) {
  std::size_t free = 0, total = 0;
  driver.check(driver.cuMemGetInfo(&free, &total), "cuMemGetInfo");
  return free;
}

int count_devices(const Driver& driver) {
  int count = 0;
  driver.check(driver.cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

constexpr CUmemAllocationHandleType kExported = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

CUmemAllocationProp memory_of(CUdevice device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  return properties;
}

int attribute(const Driver& driver, CUdevice device, CUdevice_attribute what) {
  int value = 0;
  driver.check(driver.cuDeviceGetAttribute(&value, what, device), "cuDeviceGetAttribute({})",
               static_cast<int>(what));
  return value;
}

CUdevice find_device(const Driver& driver, int index) {
  const int count = count_devices(driver);
  if (index < 0 || index >= count)
    fail(ErrorCode::kNotFound,
         "GPU {} was asked for, but this process may use {}; give an index from 0 on, or look at "
         "CUDA_VISIBLE_DEVICES",
         index,
         count == 0   ? "none"
         : count == 1 ? "GPU 0 alone"
                      : fmt::format("GPUs 0 to {} alone", count - 1));
  CUdevice device = 0;
  driver.check(driver.cuDeviceGet(&device, index), "cuDeviceGet({})", index);
  return device;
}

DeviceInfo describe(const Driver& driver, CUdevice device, int index) {
  DeviceInfo info;
  info.index = index;
  std::array<char, 256> text{};
  driver.check(driver.cuDeviceGetName(text.data(), text.size(), device), "cuDeviceGetName");
  info.name = text.data();
  driver.check(driver.cuDeviceGetPCIBusId(text.data(), text.size(), device), "cuDeviceGetPCIBusId");
  for (const char c : std::string(text.data())) info.pci_address += static_cast<char>(std::tolower(c));
  CUuuid uuid{};
  driver.check(driver.cuDeviceGetUuid(&uuid, device), "cuDeviceGetUuid");
  for (const char byte : uuid.bytes) info.uuid += fmt::format("{:02x}", static_cast<unsigned char>(byte));
  info.major = attribute(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  info.minor = attribute(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  info.multiprocessors = attribute(driver, device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  info.copy_engines = attribute(driver, device, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT);
  driver.check(driver.cuDriverGetVersion(&info.driver), "cuDriverGetVersion");
  driver.check(driver.cuDeviceTotalMem(&info.memory, device), "cuDeviceTotalMem");
  return info;
}

void refuse_unfit(const Driver& driver, CUdevice device, const DeviceInfo& info) {
  constexpr int kLeastMajor = 8;  // kernels are built for compute capability 8.0 and later
  if (info.major < kLeastMajor)
    fail(ErrorCode::kNotFound,
         "GPU {} ({}) has compute capability {}.{}, and Sluice needs {}.0 or later (Ampere, 2020); use "
         "another GPU, or do without a GPU",
         info.index, info.name, info.major, info.minor, kLeastMajor);
  if (attribute(driver, device, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0)
    fail(ErrorCode::kNotFound,
         "GPU {} ({}) cannot map memory at addresses of the caller's choice, which Sluice needs (it may be a "
         "share of a GPU, a vGPU); use a whole GPU, or do without a GPU",
         info.index, info.name);
  if (attribute(driver, device, CU_DEVICE_ATTRIBUTE_COMPUTE_MODE) == CU_COMPUTEMODE_PROHIBITED)
    fail(ErrorCode::kNotFound,
         "GPU {} ({}) is set to accept no process (compute mode \"prohibited\"); `nvidia-smi -c DEFAULT` "
         "changes that",
         info.index, info.name);
}

}  // namespace

CudaDevice::CudaDevice(int index) : driver_(load_driver()) {
  driver_.speaker = fmt::format("GPU {}", index);
  const Relaxed relaxed(driver_);
  relaxed.check();
  device_ = find_device(driver_, index);
  info_ = describe(driver_, device_, index);
  driver_.speaker += fmt::format(" ({})", info_.pci_address);
  refuse_unfit(driver_, device_, info_);
  const CUresult result = driver_.cuDevicePrimaryCtxRetain(&context_, device_);
  if (result == CUDA_ERROR_DEVICE_UNAVAILABLE)
    fail(ErrorCode::kIo,
         "GPU {} ({}) is busy: another process has it for itself (compute mode \"exclusive process\"); end "
         "that process, or use another GPU",
         index, info_.name);
  driver_.check(result, "cuDevicePrimaryCtxRetain");
  const CUmemAllocationProp properties = memory_of(device_);
  const CUresult granularity = driver_.cuMemGetAllocationGranularity(&info_.extent_bytes, &properties,
                                                                     CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  if (granularity != CUDA_SUCCESS) (void)driver_.cuDevicePrimaryCtxRelease(device_);
  driver_.check(granularity, "cuMemGetAllocationGranularity");
}

CudaDevice::~CudaDevice() {
  const Relaxed relaxed(driver_);
  if (kernels_ != nullptr) {
    const InContext in(driver_, context_, std::nothrow);
    (void)driver_.cuModuleUnload(kernels_);
  }
  (void)driver_.cuDevicePrimaryCtxRelease(device_);
}

std::size_t CudaDevice::free_memory() const {
  const InContext in(driver_, context_);
  return free_in_current(driver_);
}

std::size_t CudaDevice::measure_context() {
  const KernelFile kernels = read_kernels();
  const Relaxed relaxed(driver_);
  relaxed.check();
  const std::size_t before = free_memory();
  const OneMoreContext more(driver_, device_, kernels);
  return before - std::min(before, free_in_current(driver_));
}

Device::Extent CudaDevice::create_extent(std::size_t bytes) { return create(bytes, memory_of(device_)); }
Device::Extent CudaDevice::create_shared_extent(std::size_t bytes) {
  CUmemAllocationProp properties = memory_of(device_);
  properties.requestedHandleTypes = kExported;
  return create(bytes, properties);
}
Device::Extent CudaDevice::create(std::size_t bytes, const CUmemAllocationProp& properties) {
  const InContext in(driver_, context_);
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result = driver_.cuMemCreate(&handle, bytes, &properties, 0);
  if (result == CUDA_ERROR_OUT_OF_MEMORY)
    fail(ErrorCode::kBudget, "{} of memory were asked of GPU {} ({}), of which {} are free; ask for less",
         format_size(bytes), info_.index, info_.name, format_size(free_memory()));
  driver_.check(result, "cuMemCreate({} bytes)", bytes);
  return handle;
}
void CudaDevice::release_extent(Extent extent) {
  const InContext in(driver_, context_);
  driver_.check(driver_.cuMemRelease(extent), "cuMemRelease");
}

Descriptor CudaDevice::export_extent(Extent shared) {
  const InContext in(driver_, context_);
  int descriptor = -1;
  driver_.check(driver_.cuMemExportToShareableHandle(&descriptor, shared, kExported, 0),
                "cuMemExportToShareableHandle");
  return Descriptor(descriptor);
}
Device::Extent CudaDevice::import_extent(const Descriptor& exported) {
  const InContext in(driver_, context_);
  CUmemGenericAllocationHandle handle = 0;
  void* const descriptor = reinterpret_cast<void*>(static_cast<std::intptr_t>(exported.get()));
  driver_.check(driver_.cuMemImportFromShareableHandle(&handle, descriptor, kExported),
                "cuMemImportFromShareableHandle");
  return handle;
}

DeviceAddress CudaDevice::reserve_addresses(std::size_t bytes) {
  const InContext in(driver_, context_);
  CUdeviceptr address = 0;
  driver_.check(driver_.cuMemAddressReserve(&address, bytes, 0, 0, 0), "cuMemAddressReserve({} bytes)",
                bytes);
  return address;
}
void CudaDevice::free_addresses(DeviceAddress address, std::size_t bytes) {
  const InContext in(driver_, context_);
  driver_.check(driver_.cuMemAddressFree(address, bytes), "cuMemAddressFree({:#x}, {} bytes)", address,
                bytes);
}

// One call sets access to all of them, since each such call may stall the whole GPU.
void CudaDevice::map(std::size_t bytes, std::span<const Mapping> mappings) {
  if (mappings.empty()) return;
  const InContext in(driver_, context_);
  const DeviceAddress begin = mappings.front().address;
  const std::size_t all = mappings.back().address + bytes - begin;
  std::size_t mapped = 0;
  try {
    for (const auto& [address, extent] : mappings) {
      driver_.check(driver_.cuMemMap(address, bytes, 0, extent, 0), "cuMemMap({:#x}, {} bytes)", address,
                    bytes);
      ++mapped;
    }
    driver_.check(set_access(begin, all), "cuMemSetAccess({:#x}, {} bytes)", begin, all);
  } catch (...) {
    for (const auto& [address, extent] : mappings.first(mapped)) (void)driver_.cuMemUnmap(address, bytes);
    throw;
  }
}
CUresult CudaDevice::set_access(DeviceAddress address, std::size_t bytes) {
  CUmemAccessDesc access{};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return driver_.cuMemSetAccess(address, bytes, &access, 1);
}
void CudaDevice::unmap(DeviceAddress address, std::size_t bytes) {
  const InContext in(driver_, context_);
  driver_.check(driver_.cuMemUnmap(address, bytes), "cuMemUnmap({:#x}, {} bytes)", address, bytes);
}

void CudaDevice::register_host(std::byte* memory, std::size_t bytes) {
  const InContext in(driver_, context_);
  const CUresult result = driver_.cuMemHostRegister(memory, bytes, CU_MEMHOSTREGISTER_PORTABLE);
  if (result == CUDA_ERROR_OUT_OF_MEMORY || result == CUDA_ERROR_NOT_PERMITTED)
    fail(ErrorCode::kIo,
         "{}: the driver refuses to register {} of host memory: {}; the machine has too little memory for "
         "it, this process may lock too little, or it is 512 GiB or more, which drivers refuse at once; "
         "state less memory, or raise `ulimit -l`",
         driver_.speaker, format_size(bytes), driver_.words(result));
  driver_.check(result, "cuMemHostRegister({} bytes)", bytes);
}
void CudaDevice::unregister_host(std::byte* memory) {
  const InContext in(driver_, context_);
  driver_.check(driver_.cuMemHostUnregister(memory), "cuMemHostUnregister");
}

Device::Stream CudaDevice::make_stream(bool urgent) {
  const InContext in(driver_, context_);
  int least = 0, greatest = 0;
  driver_.check(driver_.cuCtxGetStreamPriorityRange(&least, &greatest), "cuCtxGetStreamPriorityRange");
  CUstream stream = nullptr;
  driver_.check(
      driver_.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, urgent ? greatest : least),
      "cuStreamCreateWithPriority");
  return Stream(stream, EndStream{this});
}
Device::Event CudaDevice::make_event(bool timed) {
  const InContext in(driver_, context_);
  CUevent event = nullptr;
  // Waiting threads sleep instead of spinning: there are as many as cores, and others need these.
  const unsigned flags = timed ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC;
  driver_.check(driver_.cuEventCreate(&event, flags), "cuEventCreate");
  return Event(event, EndEvent{this});
}
// An error here is that of earlier work, which its event has reported, or the driver is shutting down.
void CudaDevice::end(CUstream_st* stream) noexcept {
  const InContext in(driver_, context_, std::nothrow);
  (void)driver_.cuStreamDestroy(stream);
}
void CudaDevice::end(CUevent_st* event) noexcept {
  const InContext in(driver_, context_, std::nothrow);
  (void)driver_.cuEventDestroy(event);
}

void CudaDevice::record(CUevent_st* event, CUstream_st* stream) {
  const InContext in(driver_, context_);
  driver_.check(driver_.cuEventRecord(event, stream), "cuEventRecord");
}
void CudaDevice::wait(CUstream_st* stream, CUevent_st* event) {
  const InContext in(driver_, context_);
  driver_.check(driver_.cuStreamWaitEvent(stream, event, CU_EVENT_WAIT_DEFAULT), "cuStreamWaitEvent");
}
bool CudaDevice::is_done(CUevent_st* event) {
  const InContext in(driver_, context_);
  const CUresult result = driver_.cuEventQuery(event);
  if (result == CUDA_ERROR_NOT_READY) return false;
  driver_.check(result, "cuEventQuery");
  return true;
}
void CudaDevice::synchronize(CUevent_st* event) {
  const InContext in(driver_, context_);
  driver_.check(driver_.cuEventSynchronize(event), "cuEventSynchronize");
}
void CudaDevice::synchronize(CUstream_st* stream) {
  const InContext in(driver_, context_);
  driver_.check(driver_.cuStreamSynchronize(stream), "cuStreamSynchronize");
}
double CudaDevice::seconds_between(CUevent_st* first, CUevent_st* second) {
  const InContext in(driver_, context_);
  float milliseconds = 0;
  driver_.check(driver_.cuEventElapsedTime(&milliseconds, first, second), "cuEventElapsedTime");
  return 1e-3 * static_cast<double>(milliseconds);
}

void CudaDevice::copy_in(CUstream_st* stream, DeviceAddress to, const std::byte* from, std::size_t bytes) {
  const InContext in(driver_, context_);
  driver_.check(driver_.cuMemcpyHtoDAsync(to, from, bytes, stream), "cuMemcpyHtoDAsync({:#x}, {} bytes)", to,
                bytes);
}
void CudaDevice::copy_out(CUstream_st* stream, std::byte* to, DeviceAddress from, std::size_t bytes) {
  const InContext in(driver_, context_);
  driver_.check(driver_.cuMemcpyDtoHAsync(to, from, bytes, stream), "cuMemcpyDtoHAsync({:#x}, {} bytes)",
                from, bytes);
}
void CudaDevice::copy(CUstream_st* stream, DeviceAddress to, DeviceAddress from, std::size_t bytes) {
  const InContext in(driver_, context_);
  driver_.check(driver_.cuMemcpyDtoDAsync(to, from, bytes, stream),
                "cuMemcpyDtoDAsync({:#x}, {:#x}, {} bytes)", to, from, bytes);
}
void CudaDevice::fill(CUstream_st* stream, DeviceAddress to, std::byte value, std::size_t bytes) {
  const InContext in(driver_, context_);
  driver_.check(driver_.cuMemsetD8Async(to, static_cast<unsigned char>(value), bytes, stream),
                "cuMemsetD8Async({:#x}, {} bytes)", to, bytes);
}
void CudaDevice::call(CUstream_st* stream, void (*function)(void*), void* argument) {
  const InContext in(driver_, context_);
  driver_.check(driver_.cuLaunchHostFunc(stream, function, argument), "cuLaunchHostFunc");
}
CUfunc_st* CudaDevice::kernel(const char* name) {
  const InContext in(driver_, context_);
  const std::lock_guard lock(mutex_);
  if (kernels_ == nullptr) {
    const KernelFile file = read_kernels();
    check_loaded(driver_, driver_.cuModuleLoadData(&kernels_, file.image.data()), file);
  }
  CUfunction function = nullptr;
  const CUresult result = driver_.cuModuleGetFunction(&function, kernels_, name);
  ensure(result != CUDA_ERROR_NOT_FOUND, "the file of kernels has no kernel {}", name);
  driver_.check(result, "cuModuleGetFunction({})", name);
  return function;
}
void CudaDevice::launch(CUstream_st* stream, CUfunc_st* kernel, unsigned blocks, unsigned threads,
                        const void* arguments) {
  const InContext in(driver_, context_);
  void* one[] = {const_cast<void*>(arguments)};  // the driver copies the structure
  driver_.check(driver_.cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, one, nullptr),
                "cuLaunchKernel({} blocks of {} threads)", blocks, threads);
}
bool CudaDevice::is_capturing(CUstream_st* stream) {
  const InContext in(driver_, context_);
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  const CUresult result = driver_.cuStreamIsCapturing(stream, &status);
  if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
    return true;  // the default stream conflicts with captures
  driver_.check(result, "cuStreamIsCapturing");
  return status != CU_STREAM_CAPTURE_STATUS_NONE;
}
void CudaDevice::run_in_context(const std::function<void()>& action) {
  const InContext in(driver_, context_);
  action();
}

}  // namespace sluice::cuda

extern "C" __attribute__((visibility("default"))) const sluice::cuda::Plugin* sluice_cuda_plugin() {
  static const sluice::cuda::Plugin plugin{
      sluice::cuda::kPluginAbi,
      [](int index) -> sluice::Device* { return new sluice::cuda::CudaDevice(index); },
      [] { return sluice::cuda::count_devices(sluice::cuda::load_driver()); }};
  return &plugin;
}
