#include "kernels/cuda/sum.h"

#include "core/cuda/kernel.h"

// Gradients that are added in f32, and handed out, with the bits of kernels/reduce.cc and kernels/elementwise.cc.
namespace sluice::kernels {
namespace gpu {

__device__ __forceinline__ float widened(const void* values, Dtype type, std::uint64_t i) {
  if (type == Dtype::kF32) return static_cast<const float*>(values)[i];
  if (type == Dtype::kBf16) return to_f32(static_cast<const Bf16*>(values)[i]);
  return to_f32(static_cast<const F16*>(values)[i]);
}

// What the type keeps of the value is multiplied, and what it keeps of that is stored.
__device__ __forceinline__ void store_scaled(float value, float factor, void* to, Dtype type, std::uint64_t i) {
  if (type == Dtype::kF32) static_cast<float*>(to)[i] = factor == 1 ? value : value * factor;
  if (type == Dtype::kBf16) {
    const Bf16 kept = to_bf16(value);
    static_cast<Bf16*>(to)[i] = factor == 1 ? kept : to_bf16(to_f32(kept) * factor);
  }
  if (type == Dtype::kF16) {
    const F16 kept = to_f16(value);
    static_cast<F16*>(to)[i] = factor == 1 ? kept : to_f16(to_f32(kept) * factor);
  }
}

// Calls body(i) for the thread's elements.
template <class Body>
__device__ __forceinline__ void for_own(std::uint64_t count, Body body) {
  const std::uint64_t begin = blockIdx.x * std::uint64_t{kSumElements}, end = begin + kSumElements;
  for (std::uint64_t i = begin + threadIdx.x; i < end && i < count; i += kSumThreads) body(i);
}

}  // namespace gpu

SLUICE_KERNEL(sluice_add, GpuAddition) {
  gpu::for_own(arguments.count, [&](std::uint64_t i) {
    const float value = gpu::widened(arguments.from, arguments.type, i);
    float sum = arguments.to[i];
    if (arguments.factor != 1) sum *= arguments.factor;
    arguments.to[i] = arguments.accumulate ? sum + value : value;
  });
}

SLUICE_KERNEL(sluice_scaled_copy, GpuScaledCopy) {
  gpu::for_own(arguments.count, [&](std::uint64_t i) {
    gpu::store_scaled(arguments.from[i], arguments.factor, arguments.to, arguments.type, i);
  });
}

}  // namespace sluice::kernels
