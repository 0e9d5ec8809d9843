#include <cuda.h>

#include <cstdio>

#include "core/cuda/driver.h"
#include "cuda/fake/driver.h"
#include "cuda/fake/fibers.h"

// The functions of the driver that Sluice calls, without a GPU: see control.h.
using sluice::fake_cuda::fake;
using sluice::fake_cuda::Refusal;

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
    SLUICE_NAME(CUDA_ERROR_DEVICE_UNAVAILABLE)
    SLUICE_NAME(CUDA_ERROR_ECC_UNCORRECTABLE)
    SLUICE_NAME(CUDA_ERROR_LAUNCH_FAILED)
    SLUICE_NAME(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
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
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  return fake().call("cuDeviceGetUuid", false, [&] {
    fake().expect_device(device);
    *uuid = {};
    uuid->bytes[0] = static_cast<char>(device);
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
    fake().contexts_.push_back(*context);
    fake().account();
  });
}
CUresult cuCtxDestroy(CUcontext context) {
  return fake().call("cuCtxDestroy", false, [&] {
    const auto is_it = [&](const auto& made) { return reinterpret_cast<CUcontext>(made.get()) == context; };
    if (std::erase_if(fake().made_contexts_, is_it) == 0)
      throw Refusal{CUDA_ERROR_INVALID_CONTEXT, "a context ends that nobody has made"};
    if (!fake().contexts_.empty() && fake().contexts_.back() == context) fake().contexts_.pop_back();
    fake().account();
  });
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  return fake().call("cuCtxGetCurrent", false,
                     [&] { *context = fake().contexts_.empty() ? nullptr : fake().contexts_.back(); });
}
CUresult cuCtxPushCurrent(CUcontext context) {
  return fake().call("cuCtxPushCurrent", false, [&] { fake().contexts_.push_back(context); });
}
CUresult cuCtxPopCurrent(CUcontext* context) {
  return fake().call("cuCtxPopCurrent", false, [&] {
    if (fake().contexts_.empty())
      throw Refusal{CUDA_ERROR_INVALID_CONTEXT, "a context is popped, and none is current"};
    *context = fake().contexts_.back();
    fake().contexts_.pop_back();
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
    const auto exported = properties->requestedHandleTypes;
    if (exported != 0 && exported != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
      throw Refusal{CUDA_ERROR_NOT_SUPPORTED, "memory is exported by what is no descriptor"};
    *handle = fake().memory_->create(bytes, exported != 0, properties->location.id);
  });
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return fake().call_in_context("cuMemRelease", [&] { fake().memory_->release(handle); });
}
CUresult cuMemExportToShareableHandle(void* exported, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long) {
  return fake().call_in_context("cuMemExportToShareableHandle", [&] {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
      throw Refusal{CUDA_ERROR_NOT_SUPPORTED, "memory is exported by what is no descriptor"};
    *static_cast<int*>(exported) = fake().memory_->export_file(handle);
  });
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* exported,
                                        CUmemAllocationHandleType type) {
  return fake().call_in_context("cuMemImportFromShareableHandle", [&] {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
      throw Refusal{CUDA_ERROR_NOT_SUPPORTED, "memory is imported by what is no descriptor"};
    *handle = fake().memory_->import_file(static_cast<int>(reinterpret_cast<std::intptr_t>(exported)));
  });
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
    if (count != 1 || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
      throw Refusal{CUDA_ERROR_INVALID_VALUE, "access is given that is not one device's to read and write"};
    fake().expect_device(access->location.id);
    if (fake().memory_->is_imported(address) && !fake().reaches(access->location.id, address))
      throw Refusal{CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, {}};
    fake().memory_->allow(address, bytes);
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
      sluice::fake_cuda::Captures::exchange_mode(*mode);
  });
}
// Tests call these in a client's place. Nothing of a client's is captured, so that each graph is empty.
CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  return fake().call_in_context("cuStreamCreate",
                                [&] { *stream = fake().work_->make_stream(flags == CU_STREAM_DEFAULT); });
}
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
