#pragma once
#include "core/device.h"
#include "kernels/grid.h"

namespace sluice::kernels {

// Reduces sums of squares on a GPU, from one f64 for each block of the grid (DeviceSum::add()) to nodes of
// the pairwise tree. The bits are those of PartialSum, except for NaN. Thread rule: one thread at a time.
class DeviceSquares {
 public:
  // A node covers at most 2^kMostLevel blocks, and so 2^20 elements.
  static constexpr std::uint8_t kMostLevel = 10;

  // Throws Error(kNotFound), Error(kBudget) or Error(kIo) where a kernel is missing or cannot be loaded. The
  // device outlives the object.
  explicit DeviceSquares(Device& device);
  // All addresses are on the GPU and aligned to their elements. Both functions throw Error(kIo) where the
  // kernel cannot be queued. add_up() sets sums[i] to the sum of node i, or to NaN where the node is not
  // within leaf_count leaves or covers more than 2^kMostLevel of them.
  void add_up(CUstream_st* stream, std::size_t count, const SumNode* nodes, std::size_t leaf_count,
              const double* leaves, double* sums);
  // Writes 1 to `found` where one of `count` sums is not finite; else writes nothing.
  void check(CUstream_st* stream, std::size_t count, const double* sums, std::uint32_t* found);

 private:
  Device& device_;
  CUfunc_st *nodes_, *check_;
};

}  // namespace sluice::kernels
