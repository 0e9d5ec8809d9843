#pragma once
#include "core/device.h"
#include "kernels/grid.h"

namespace sluice::kernels {

// Puts sums of squares together on a GPU, in whose memory they are, an f64 for each block of the grid
// (DeviceSum::add()): the nodes of the written order's tree have the bits that PartialSum gives them, but for
// those of NaN. Thread rule: one thread at a time.
class DeviceSquares {
 public:
  // A node has up to 2^kMostLevel blocks, and so 2^20 elements.
  static constexpr std::uint8_t kMostLevel = 10;

  // Throws Error(kNotFound), Error(kBudget) or Error(kIo) where a kernel is missing or cannot be loaded. The
  // device outlives the object.
  explicit DeviceSquares(Device& device);
  // For both: all addresses are the GPU's, and multiples of the size of what is there. They throw Error(kIo)
  // where the kernel cannot be queued. sums[i] becomes the sum of node i, or NaN where that does not lie
  // within so many leaves or has more than 2^kMostLevel of them.
  void add_up(CUstream_st* stream, std::size_t count, const SumNode* nodes, std::size_t leaf_count,
              const double* leaves, double* sums);
  // 1 is written to `found` where one of so many sums is not finite; else nothing is written.
  void check(CUstream_st* stream, std::size_t count, const double* sums, std::uint32_t* found);

 private:
  Device& device_;
  CUfunc_st *nodes_, *check_;
};

}  // namespace sluice::kernels
