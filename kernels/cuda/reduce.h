#pragma once
#include <cstdint>

#include "kernels/grid.h"

// The interface between host and GPU for sums of squares. Private to this room.
namespace sluice::kernels {

// Pointers are GPU addresses.
struct GpuNodeSums {
  std::uint64_t count = 0, leaf_count = 0;
  const SumNode* nodes = nullptr;
  const double* leaves = nullptr;
  double* sums = nullptr;
};

inline constexpr unsigned kNodeThreads = 128, kWarpThreads = 32;
inline constexpr std::uint64_t kMostLeaves = kWarpThreads * kWarpThreads;  // of a node, summed by one warp

// Writes 1 to `found` where one of `count` sums is not finite.
struct GpuFiniteCheck {
  std::uint64_t count = 0;
  const double* sums = nullptr;
  std::uint32_t* found = nullptr;
};

inline constexpr unsigned kCheckThreads = 256;

}  // namespace sluice::kernels
