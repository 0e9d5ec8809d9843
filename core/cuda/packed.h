#pragma once
#include <cstddef>
#include <cstdint>

#include "core/cuda/kernel.h"
#include "core/dtype.h"

namespace sluice {

// kCount consecutive elements that a GPU thread loads or stores in accesses of up to 16 bytes, the widest
// that all GPUs support for which the kernels are compiled.
template <class T, int kCount>
inline constexpr std::size_t kPackedBytes = kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16;
template <class T, int kCount>
struct alignas(kPackedBytes<T, kCount>) Packed {
  T values[kCount];
};
// Whether the array may be accessed as Packed from this element on.
template <int kCount, class T>
__device__ __forceinline__ bool is_packed(const T* first) {
  return reinterpret_cast<std::uintptr_t>(first) % kPackedBytes<T, kCount> == 0;
}

// Rounds two floats to 16 bits each and packs them, the first one in the lower half. The bits are those of
// to_bf16() and to_f16(), except for NaN.
__device__ __forceinline__ std::uint32_t two_bf16(float low, float high) {
#ifdef __CUDACC__
  std::uint32_t both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  return to_bf16(low).bits | std::uint32_t{to_bf16(high).bits} << 16;
#endif
}
__device__ __forceinline__ std::uint32_t two_f16(float low, float high) {
#ifdef __CUDACC__
  std::uint32_t both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
#else
  return to_f16(low).bits | std::uint32_t{to_f16(high).bits} << 16;
#endif
}
__device__ __forceinline__ float of_f16(std::uint16_t bits) {
#ifdef __CUDACC__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#else
  return to_f32(F16{bits});
#endif
}

}  // namespace sluice
