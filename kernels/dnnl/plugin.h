#pragma once
#include <cstdint>

#include "kernels/matrix.h"

// A matrix library's plug-in exports one function of this name and type, with C linkage. The interface behind
// it is C++, so both sides must be built from the same headers: `abi` is raised with each change of them, and
// is compared before anything else is called.
namespace sluice::kernels {

inline constexpr std::uint32_t kMatrixPluginAbi = 4;
inline constexpr const char* kMatrixPluginFile = "libsluice_dnnl.so";
inline constexpr const char* kMatrixPluginSymbol = "sluice_matrix_plugin";

struct MatrixPlugin {
  std::uint32_t abi;
  MatrixLibrary* (*create)(int threads);  // the caller owns what it returns
};
using MatrixPluginFunction = const MatrixPlugin* (*)();

}  // namespace sluice::kernels
