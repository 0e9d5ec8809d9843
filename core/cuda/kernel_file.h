#pragma once
#include <string>

namespace sluice::cuda {

// Returns the fat binary of kernels, from the file libsluice_kernels.fatbin beside this plug-in
// (scripts/kernels.sh makes it). Throws Error(kNotFound) where it is not there, or was made of other sources.
std::string read_kernels();

}  // namespace sluice::cuda
