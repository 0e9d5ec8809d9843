#pragma once
#include "core/device.h"
#include "core/dtype.h"

namespace sluice::kernels {

// Sums of squares of what is in a GPU's memory, on the GPU. They are sums of the grid's blocks: what makes a
// SquareSum of them, with the bits of sum_of_squares(), is square_sum() in reduce.h, on the CPU. Thread rule:
// one thread at a time.
class DeviceSquares {
 public:
  // Throws Error(kNotFound), Error(kBudget) or Error(kIo) where the kernel is missing or cannot be loaded.
  // The device outlives the object.
  explicit DeviceSquares(Device& device);
  // The memory that the sums of n elements take: an f64 for each block of the grid.
  static std::size_t sum_bytes(std::size_t n);
  // Queues the sums of n elements of any f32, bf16 or f16 array, which begin on the grid, into `sums`. Both
  // addresses are the GPU's, and multiples of the size of what is there. Throws Error(kIo) where the kernel
  // cannot be queued.
  void queue(CUstream_st* stream, std::size_t n, ConstArray values, DeviceAddress sums);
  // Queues that 1 is written to `found`, a 32-bit number, where one of so many sums is not finite; else
  // nothing is written. Throws as queue().
  void check(CUstream_st* stream, std::size_t sum_count, DeviceAddress sums, DeviceAddress found);

 private:
  Device& device_;
  CUfunc_st *kernel_, *check_;
};

}  // namespace sluice::kernels
