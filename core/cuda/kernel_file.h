#pragma once
#include <string>

#include "core/cuda/driver.h"

namespace sluice::cuda {

// The file libsluice_kernels.fatbin beside this plug-in (made by scripts/kernels.sh) and the fat binary of
// kernels that it contains.
struct KernelFile {
  std::string path, image;
};

// Throws Error(kNotFound) where the file is missing or was built from other sources, and Error(kCorrupt)
// where it is damaged.
KernelFile read_kernels();

// Throws an Error unless cuModuleLoadData() has succeeded with the image: kNotFound where the image has no
// code for this GPU or driver.
void check_loaded(const Driver& driver, CUresult result, const KernelFile& kernels);

}  // namespace sluice::cuda
