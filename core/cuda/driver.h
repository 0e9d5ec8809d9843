#pragma once
#include <cuda.h>

#include <string>

#include "core/error.h"

// The functions of CUDA's driver API that Sluice calls. They are looked up in libcuda when a device is
// opened, so that no build needs the driver or a stub library.
#define SLUICE_CUDA_FUNCTIONS(X)       \
  X(cuInit)                            \
  X(cuDriverGetVersion)                \
  X(cuGetErrorName)                    \
  X(cuGetErrorString)                  \
  X(cuDeviceGetCount)                  \
  X(cuDeviceGet)                       \
  X(cuDeviceGetName)                   \
  X(cuDeviceGetPCIBusId)               \
  X(cuDeviceGetUuid)                   \
  X(cuDeviceGetAttribute)              \
  X(cuDeviceTotalMem)                  \
  X(cuDevicePrimaryCtxRetain)          \
  X(cuDevicePrimaryCtxRelease)         \
  X(cuCtxCreate)                       \
  X(cuCtxDestroy)                      \
  X(cuCtxGetCurrent)                   \
  X(cuCtxPushCurrent)                  \
  X(cuCtxPopCurrent)                   \
  X(cuMemGetInfo)                      \
  X(cuMemGetAllocationGranularity)     \
  X(cuMemAddressReserve)               \
  X(cuMemAddressFree)                  \
  X(cuMemCreate)                       \
  X(cuMemRelease)                      \
  X(cuMemExportToShareableHandle)      \
  X(cuMemImportFromShareableHandle)    \
  X(cuMemMap)                          \
  X(cuMemUnmap)                        \
  X(cuMemSetAccess)                    \
  X(cuMemHostRegister)                 \
  X(cuMemHostUnregister)               \
  X(cuStreamCreateWithPriority)        \
  X(cuStreamDestroy)                   \
  X(cuStreamSynchronize)               \
  X(cuStreamWaitEvent)                 \
  X(cuStreamIsCapturing)               \
  X(cuThreadExchangeStreamCaptureMode) \
  X(cuCtxGetStreamPriorityRange)       \
  X(cuEventCreate)                     \
  X(cuEventDestroy)                    \
  X(cuEventRecord)                     \
  X(cuEventQuery)                      \
  X(cuEventSynchronize)                \
  X(cuEventElapsedTime)                \
  X(cuMemcpyHtoDAsync)                 \
  X(cuMemcpyDtoHAsync)                 \
  X(cuMemcpyDtoDAsync)                 \
  X(cuMemsetD8Async)                   \
  X(cuLaunchHostFunc)                  \
  X(cuModuleLoadData)                  \
  X(cuModuleUnload)                    \
  X(cuModuleGetFunction)               \
  X(cuLaunchKernel)

namespace sluice::cuda {

// The oldest CUDA version that has all these functions; driver 580 brought it.
inline constexpr int kCudaVersion = 13000;

struct Driver {
#define SLUICE_CUDA_MEMBER(name) decltype(&::name) name = nullptr;
  SLUICE_CUDA_FUNCTIONS(SLUICE_CUDA_MEMBER)
#undef SLUICE_CUDA_MEMBER
  std::string path;  // of the library
  // The subject of error messages: the name of the device's GPU where it is known.
  std::string speaker = "the GPU's driver";

  // Returns the driver's text for a result, as in "CUDA_ERROR_OUT_OF_MEMORY (out of memory)".
  std::string words(CUresult result) const;

  // Throws where a call has failed: Error(kBudget) where the device lacks memory, else Error(kIo).
  template <class... Arguments>
  void check(CUresult result, fmt::format_string<Arguments...> call, Arguments&&... arguments) const {
    if (result == CUDA_SUCCESS) return;
    refuse(result, fmt::format(call, std::forward<Arguments>(arguments)...));
  }

 private:
  [[noreturn]] void refuse(CUresult result, const std::string& call) const;
};

// Loads the driver ($SLUICE_CUDA_DRIVER, else libcuda.so.1) and initializes it. Throws Error(kNotFound), with
// the remedy, where it is missing or too old, and Error(kIo) where initializing fails. The library is never
// unloaded.
Driver load_driver();

}  // namespace sluice::cuda
