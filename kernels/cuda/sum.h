#pragma once
#include <cstdint>

#include "core/dtype.h"

// What host and GPU agree on for gradients that are added and read. Private to this room.
namespace sluice::kernels {

// Of `count` elements. Pointers are addresses of the GPU's. Each result of a multiplication or an addition is
// rounded to the type that it has in memory.
struct GpuAddition {
  std::uint64_t count = 0;
  const void* from = nullptr;
  float* to = nullptr;  // becomes from, or to * factor + from
  Dtype type = Dtype::kF32;
  bool accumulate = false;
  float factor = 1;
};
struct GpuScaledCopy {
  std::uint64_t count = 0;
  const float* from = nullptr;
  void* to = nullptr;
  Dtype type = Dtype::kF32;
  float factor = 1;  // multiplies what `to` then has
};

inline constexpr unsigned kSumThreads = 256;
inline constexpr std::size_t kSumElements = kSumThreads * 8;  // that a block works on

}  // namespace sluice::kernels
