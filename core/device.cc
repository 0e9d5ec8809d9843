#include "core/device.h"

#include <dlfcn.h>

#include "core/cuda/plugin.h"
#include "core/plugin.h"

namespace sluice {

std::unique_ptr<Device> open_device(int index) {
  static const auto* const plugin = static_cast<const cuda::Plugin*>(
      open_plugin(cuda::kPluginFile, cuda::kPluginSymbol, cuda::kPluginAbi, RTLD_NOW | RTLD_LOCAL, "CUDA",
                  "build Sluice where CUDA's header cuda.h is (docs/dependencies.md)"));
  return std::unique_ptr<Device>(plugin->open(index));
}

}  // namespace sluice
