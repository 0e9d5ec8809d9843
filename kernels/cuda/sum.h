#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "kernels/grid.h"

// The interface between host and GPU for adding and copying gradients. Private to this room.
namespace sluice::kernels {

// An addition of `count` elements, beginning at a block of the grid. Pointers are GPU addresses. Each result
// of a multiplication or an addition is rounded to the type of `to`.
struct GpuAddition {
  std::uint64_t count = 0;
  const void* from = nullptr;
  void* to = nullptr;         // set to from, or with `accumulate` (f32 only) to to * factor + from
  double* squares = nullptr;  // set to the sums of squares of `to`, by block of the grid
  Dtype type = Dtype::kF32;   // of `from`
  bool keeps_type = false;    // `to` has that type, too, without accumulation; else `to` is f32
  bool accumulate = false;
  float factor = 1;
};
// The mean of the ranks' arrays, which are on this GPU or on others.
inline constexpr int kMostMeanRanks = 16;
struct GpuMean {
  std::uint64_t count = 0;
  const void* of_ranks[kMostMeanRanks] = {};
  float* to = nullptr;        // set to their sum, in the written order of ranks, times the factor
  double* squares = nullptr;  // set to the sums of squares of `to`, by block of the grid
  Dtype types[kMostMeanRanks] = {};
  std::uint32_t ranks = 0;
  bool is_packed = false;  // whether every array is aligned for packed accesses (core/cuda/packed.h)
  float factor = 1;
};
struct GpuScaledCopy {
  std::uint64_t count = 0;
  const void* from = nullptr;
  void* to = nullptr;
  Dtype from_type = Dtype::kF32, type = Dtype::kF32;
  float factor = 1;  // multiplies `to` after the copy
};

// kSumOwn: consecutive elements of a thread. kSumLanes: lanes of a block's sum. The others are threads of a
// thread block, and the elements that it adds (each warp a block of the grid) or copies.
inline constexpr int kSumOwn = 4, kCopyPlaces = 2;
inline constexpr unsigned kSumLanes = 16, kAddThreads = 128, kCopyThreads = 256;
inline constexpr std::size_t kAddElements = kAddThreads / 32 * kGridBlock;
inline constexpr std::size_t kCopyElements = std::size_t{kCopyThreads} * kSumOwn * kCopyPlaces;

}  // namespace sluice::kernels
