#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "kernels/grid.h"

// What host and GPU agree on for gradients that are added and read. Private to this room.
namespace sluice::kernels {

// Of `count` elements, which begin on the grid. Pointers are addresses of the GPU's. Each result of a
// multiplication or an addition is rounded to the type that it has in memory.
struct GpuAddition {
  std::uint64_t count = 0;
  const void* from = nullptr;
  void* to = nullptr;         // becomes from, or, in f32, to * factor + from
  double* squares = nullptr;  // become the sums of the squares of `to`, of each of the grid's blocks
  Dtype type = Dtype::kF32;   // of `from`
  bool keeps_type = false;    // `to` is of that type, too, and nothing is accumulated; else it is f32
  bool accumulate = false;
  float factor = 1;
};
// The mean over ranks, which have arrays of their own, on this GPU or on others.
inline constexpr int kMostMeanRanks = 16;
struct GpuMean {
  std::uint64_t count = 0;
  const void* of_ranks[kMostMeanRanks] = {};
  float* to = nullptr;        // becomes their sum, in the written order of ranks, times the factor
  double* squares = nullptr;  // become the sums of the squares of `to`, of each of the grid's blocks
  Dtype types[kMostMeanRanks] = {};
  std::uint32_t ranks = 0;
  bool is_packed = false;  // whether each array begins where a thread's elements can be accessed at once
  float factor = 1;
};
struct GpuScaledCopy {
  std::uint64_t count = 0;
  const void* from = nullptr;
  void* to = nullptr;
  Dtype from_type = Dtype::kF32, type = Dtype::kF32;
  float factor = 1;  // multiplies what `to` then has
};

// The consecutive elements of a thread, and the lanes in which a block of the grid is summed; of a GPU's
// block of threads the threads, and the elements that they add, of which a warp has a block of the grid, or
// copy.
inline constexpr int kSumOwn = 4, kCopyPlaces = 2;
inline constexpr unsigned kSumLanes = 16, kAddThreads = 128, kCopyThreads = 256;
inline constexpr std::size_t kAddElements = kAddThreads / 32 * kGridBlock;
inline constexpr std::size_t kCopyElements = std::size_t{kCopyThreads} * kSumOwn * kCopyPlaces;

}  // namespace sluice::kernels
