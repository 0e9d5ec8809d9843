#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "kernels/grid.h"

// What host and GPU agree on for sums of squares. Private to this room.
namespace sluice::kernels {

// Of `count` elements that begin on the grid. Pointers are addresses of the GPU's.
struct GpuSquares {
  std::uint64_t count = 0;
  const void* values = nullptr;
  double* sums = nullptr;  // of the grid's blocks
  Dtype type = Dtype::kF32;
};

// Writes to `found` where one of `count` sums is not finite.
struct GpuFiniteCheck {
  std::uint64_t count = 0;
  const double* sums = nullptr;
  std::uint32_t* found = nullptr;
};
inline constexpr unsigned kCheckThreads = 256;

// The threads of a block, of which each is one lane of the written order, and the elements that they sum.
inline constexpr unsigned kSquareThreads = 256, kSquareLanes = 16;
inline constexpr std::size_t kSquareElements = kSquareThreads / kSquareLanes * kGridBlock;

}  // namespace sluice::kernels
