#pragma once
#include <string>

#include "core/cuda/driver.h"

namespace sluice::cuda {

// The file libsluice_kernels.fatbin beside this plug-in (scripts/kernels.sh makes it), and the fat binary of
// kernels in it.
struct KernelFile {
  std::string path, image;
};

// Throws Error(kNotFound) where it is not there, or was made of other sources, and Error(kCorrupt) where it
// is not whole.
KernelFile read_kernels();

// Throws an Error unless cuModuleLoadData() has succeeded with the image: kNotFound where the driver finds
// nothing in it that it can use.
void check_loaded(const Driver& driver, CUresult result, const KernelFile& kernels);

}  // namespace sluice::cuda
