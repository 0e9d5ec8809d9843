#pragma once
#include <cstddef>
#include <cstdint>

#include "core/cuda/kernel.h"

namespace sluice {

// Consecutive elements that a thread of a GPU reads or writes in accesses of up to 16 bytes, the largest that
// all GPUs have for which the kernels are made.
template <class T, int kCount>
inline constexpr std::size_t kPackedBytes = kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16;
template <class T, int kCount>
struct alignas(kPackedBytes<T, kCount>) Packed {
  T values[kCount];
};
// Whether the elements from this one on may be accessed so.
template <int kCount, class T>
__device__ __forceinline__ bool is_packed(const T* first) {
  return reinterpret_cast<std::uintptr_t>(first) % kPackedBytes<T, kCount> == 0;
}

}  // namespace sluice
