#include "core/cuda/driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

namespace sluice::cuda {
namespace {

constexpr const char* kRemedy = "install NVIDIA's driver 580 or later, or do without a GPU";

template <class Function>
void find(Function& function, void* library, const char* symbol, const std::string& path) {
  void* const found = dlsym(library, symbol);
  if (found == nullptr)
    fail(ErrorCode::kNotFound, "{} has no function {}, so it is no driver for GPUs of CUDA {}; {}", path,
         symbol, kCudaVersion / 1000, kRemedy);
  std::memcpy(&function, &found, sizeof function);
}

}  // namespace

std::string Driver::words(CUresult result) const {
  const char *name = nullptr, *text = nullptr;
  if (cuGetErrorName(result, &name) != CUDA_SUCCESS || cuGetErrorString(result, &text) != CUDA_SUCCESS)
    return fmt::format("error {}", static_cast<int>(result));
  return fmt::format("{} ({})", name, text);
}

void Driver::refuse(CUresult result, const std::string& call) const {
  fail(result == CUDA_ERROR_OUT_OF_MEMORY ? ErrorCode::kBudget : ErrorCode::kIo, "{}: {}: {}", speaker, call,
       words(result));
}

Driver load_driver() {
  Driver driver;
  const char* const other = std::getenv("SLUICE_CUDA_DRIVER");
  driver.path = other != nullptr && *other != '\0' ? other : "libcuda.so.1";
  void* const library = dlopen(driver.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    fail(ErrorCode::kNotFound, "a GPU was asked for, but its driver cannot be loaded: {}; {}", dlerror(),
         kRemedy);
  decltype(&::cuGetProcAddress) get = nullptr;
  find(get, library, "cuGetProcAddress_v2", driver.path);
  find(driver.cuDriverGetVersion, library, "cuDriverGetVersion", driver.path);
  int version = 0;
  if (driver.cuDriverGetVersion(&version) != CUDA_SUCCESS) version = 0;
  if (version < kCudaVersion)
    fail(ErrorCode::kNotFound, "the GPU's driver ({}) is of CUDA {}.{}, and {}.{} is needed; {}", driver.path,
         version / 1000, version % 1000 / 10, kCudaVersion / 1000, kCudaVersion % 1000 / 10, kRemedy);
  const auto get_address = [&](const char* name) {
    void* address = nullptr;
    CUdriverProcAddressQueryResult status{};
    if (get(name, &address, kCudaVersion, CU_GET_PROC_ADDRESS_DEFAULT, &status) != CUDA_SUCCESS || !address)
      fail(ErrorCode::kNotFound, "the GPU's driver ({}) has no function {}; {}", driver.path, name, kRemedy);
    return address;
  };
#define SLUICE_CUDA_FIND(name)                                                \
  {                                                                           \
    void* const address = get_address(#name);                                 \
    std::memcpy(static_cast<void*>(&driver.name), &address, sizeof(address)); \
  }
  SLUICE_CUDA_FUNCTIONS(SLUICE_CUDA_FIND)
#undef SLUICE_CUDA_FIND
  if (const CUresult result = driver.cuInit(0); result == CUDA_ERROR_NO_DEVICE)
    fail(ErrorCode::kNotFound,
         "a GPU was asked for, but the driver finds none that this process may use ({}); look at "
         "`nvidia-smi` and at CUDA_VISIBLE_DEVICES, or do without a GPU",
         driver.words(result));
  else if (result == CUDA_ERROR_SYSTEM_NOT_READY)
    fail(ErrorCode::kIo,
         "the GPU's driver is not ready: {}; machines with NVSwitch need NVIDIA's fabric manager, of the "
         "driver's own version, to run (`systemctl start nvidia-fabricmanager`; `nvidia-smi -q` shows the "
         "state of the fabric)",
         driver.words(result));
  else if (result == CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)
    fail(ErrorCode::kIo,
         "the GPU's driver has a library ({}) and a kernel module of different versions, as after an update: "
         "{}; restart the machine",
         driver.path, driver.words(result));
  else
    driver.check(result, "cuInit");
  return driver;
}

}  // namespace sluice::cuda
