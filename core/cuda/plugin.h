#pragma once
#include <cstdint>

#include "core/device.h"

// The CUDA plug-in exports one function of this name and type, with C linkage. Both sides must be built from
// the same headers; `abi` is raised with each change of them.
namespace sluice::cuda {

inline constexpr std::uint32_t kPluginAbi = 6;
inline constexpr const char* kPluginFile = "libsluice_cuda.so";
inline constexpr const char* kPluginSymbol = "sluice_cuda_plugin";

struct Plugin {
  std::uint32_t abi;
  Device* (*open)(int index);  // the caller owns what it returns
  int (*count)();
};
using PluginFunction = const Plugin* (*)();

}  // namespace sluice::cuda
