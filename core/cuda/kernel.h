#pragma once

// The CUDA language features that kernels use. nvcc compiles kernels for GPUs. The tests' fake driver
// compiles the same sources for the CPU with its own functions of these names (tests/cuda/fake/fibers.h).
//
// SLUICE_KERNEL(name, Arguments) { ... } defines a kernel for at most 256 threads a block. It reads its
// arguments from `arguments`, a structure that the host filled.
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
