#pragma once
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>

// CUDA's kernel language for the CPU, as far as kernels here use it. The threads of a block are fibers: each
// runs until it must wait for others, and then another one goes on, in an order that a seed shuffles. So a
// barrier that was left out shows in wrong results. A barrier that not all threads reach is an error.
namespace sluice::fake_cuda {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

using KernelBody = void (*)(const void* arguments);
struct Kernel {
  KernelBody body;
  std::size_t argument_bytes;
};
// Returns the kernel of this name, or nullptr.
const Kernel* find_kernel(const char* name);
bool add_kernel(const char* name, Kernel kernel);

// Runs a kernel, block by block in an order at random. Throws Refusal (memory.h) where threads wait at a
// barrier that others do not reach.
void run_kernel(const Kernel& kernel, unsigned blocks, unsigned threads, const void* arguments,
                std::mt19937_64& random);

// A thread of the running block calls these.
void wait_for_block();
// Each of the 32 threads of a warp offers bits, and gets those of the thread whose number differs by `mask`.
std::uint64_t exchange_in_warp(std::uint64_t bits, unsigned mask);

}  // namespace sluice::fake_cuda

extern thread_local sluice::fake_cuda::Index threadIdx, blockIdx, blockDim, gridDim;

#define SLUICE_KERNEL(name, Arguments)                                                                     \
  static void name(const Arguments& arguments);                                                            \
  static const bool name##_is_added = ::sluice::fake_cuda::add_kernel(                                     \
      #name, {[](const void* given) { name(*static_cast<const Arguments*>(given)); }, sizeof(Arguments)}); \
  static void name(const Arguments& arguments)
#define __device__
#define __forceinline__ inline
#define __shared__ static thread_local

inline void __syncthreads() { sluice::fake_cuda::wait_for_block(); }
template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned mask) {
  std::uint64_t bits = 0;
  static_assert(sizeof(T) <= sizeof bits);
  std::memcpy(&bits, &value, sizeof value);
  bits = sluice::fake_cuda::exchange_in_warp(bits, mask);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
// A GPU has one NaN for what its arithmetic makes.
inline float result_of_gpu(float value) { return value == value ? value : std::bit_cast<float>(0x7fffffffu); }
inline float __fadd_rn(float a, float b) { return result_of_gpu(a + b); }
inline float __fsub_rn(float a, float b) { return result_of_gpu(a - b); }
inline float __fmul_rn(float a, float b) { return result_of_gpu(a * b); }
inline float __fdiv_rn(float a, float b) { return result_of_gpu(a / b); }
inline float __fsqrt_rn(float a) { return result_of_gpu(std::sqrt(a)); }
inline float __fmaf_rn(float a, float b, float c) { return result_of_gpu(std::fma(a, b, c)); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
