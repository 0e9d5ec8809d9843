#include "core/device.h"

#include <dlfcn.h>

#include "core/cuda/plugin.h"
#include "core/plugin.h"

namespace sluice {

namespace {

const cuda::Plugin& cuda_plugin() {
  static const auto* const plugin = static_cast<const cuda::Plugin*>(
      open_plugin(cuda::kPluginFile, cuda::kPluginSymbol, cuda::kPluginAbi, RTLD_NOW | RTLD_LOCAL, "CUDA",
                  "build Sluice where CUDA's header cuda.h is (docs/dependencies.md)"));
  return *plugin;
}

}  // namespace

std::unique_ptr<Device> open_device(int index) { return std::unique_ptr<Device>(cuda_plugin().open(index)); }

int device_count() { return cuda_plugin().count(); }

}  // namespace sluice
