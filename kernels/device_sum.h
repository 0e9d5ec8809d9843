#pragma once
#include <span>

#include "core/device.h"
#include "core/dtype.h"

namespace sluice::kernels {

// Adds arrays in a GPU's memory in f32, and hands out such sums, with the bits of store_summing_squares(),
// scale() and convert(); only NaN has other bits on a GPU. Thread rule: one thread at a time.
class DeviceSum {
 public:
  // Throws Error(kNotFound), Error(kBudget) or Error(kIo) where a kernel is missing or cannot be loaded. The
  // device outlives the object.
  explicit DeviceSum(Device& device);
  // For all: n elements of f32, bf16 or f16 arrays; all addresses are the GPU's, and multiples of the size
  // of what is there. They throw Error(kIo) where the kernel cannot be queued. to = x; or to = to * factor,
  // and then to += x. `to` is f32; without accumulate it may also have the type of x. `squares` becomes the
  // sums of the squares that `to` then has, an f64 for each block of the grid, on which the elements begin.
  void add(CUstream_st* stream, std::size_t n, ConstArray x, bool accumulate, float factor, Array to,
           double* squares);
  // to = the mean of what ranks have: of_ranks are up to kMostRanks arrays, also in memory of other GPUs,
  // which this GPU can read (Device::open_shared()); they are added in f32 in the written order of ranks
  // (comm::order_of_ranks()), and the sum is multiplied by the factor, with the bits of comm::Adder and then
  // of scale(). `to` is f32, and may be the same memory as one f32 array of them; else they do not overlap.
  // `squares` become those of `to`, as above.
  static constexpr std::size_t kMostRanks = 16;
  void mean(CUstream_st* stream, std::span<const ConstArray> of_ranks, std::size_t n, float factor, Array to,
            double* squares);
  // to = x, and then to *= factor. The two may overlap only where n is at most kOfThread.
  void copy(CUstream_st* stream, std::size_t n, ConstArray x, float factor, Array to);
  static constexpr std::size_t kOfThread = 4;

 private:
  Device& device_;
  CUfunc_st *add_, *mean_, *copy_;
};

}  // namespace sluice::kernels
