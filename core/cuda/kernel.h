#pragma once

// What kernels need of CUDA's language. nvcc compiles them for GPUs, and the tests' fake driver compiles them
// for the CPU, with functions of these names of its own (tests/cuda/fake/fibers.h).
//
// SLUICE_KERNEL(name, Arguments) { ... } is a kernel of up to 256 threads a block, which gets its arguments
// as `arguments`, a structure that the host filled.
#ifdef __CUDACC__
#include <cstdint>
#define SLUICE_KERNEL(name, Arguments) \
  extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Arguments arguments)
#define SLUICE_UNROLL _Pragma("unroll")
#define SLUICE_NO_UNROLL _Pragma("unroll 1")
#else
#define SLUICE_UNROLL
#define SLUICE_NO_UNROLL
#include "cuda/fake/fibers.h"
#endif
