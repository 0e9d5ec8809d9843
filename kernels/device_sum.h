#pragma once
#include <span>

#include "core/device.h"
#include "core/dtype.h"

namespace sluice::kernels {

// Adds and copies arrays in GPU memory, in f32, with the bits of store_summing_squares(), scale() and
// convert(); only a NaN may have other bits. Thread rule: one thread at a time.
class DeviceSum {
 public:
  // Throws Error(kNotFound), Error(kBudget) or Error(kIo) where a kernel is missing or cannot be loaded. The
  // device outlives the object.
  explicit DeviceSum(Device& device);
  // All functions take n elements of f32, bf16 or f16 arrays, at GPU addresses aligned to their elements, and
  // throw Error(kIo) where the kernel cannot be queued.
  //
  // add(): to = x; with accumulate, to = to * factor, then to += x. `to` is f32; without accumulate it may
  // also have the type of x. `squares` is set to the sums of squares of `to`, an f64 for each block of the
  // grid; the elements begin at a block.
  void add(CUstream_st* stream, std::size_t n, ConstArray x, bool accumulate, float factor, Array to,
           double* squares);
  // to = the mean over ranks: of_ranks are up to kMostRanks arrays, also in other GPUs' memory that this GPU
  // can access (Device::import_extent()). They are added in f32 in the written order of ranks
  // (comm::order_of_ranks()), and the sum is multiplied by the factor, with the bits of comm::Adder followed
  // by scale(). `to` is f32, and may be the memory of one f32 array among them; otherwise arrays do not
  // overlap. `squares` is set as in add().
  static constexpr std::size_t kMostRanks = 16;
  void mean(CUstream_st* stream, std::span<const ConstArray> of_ranks, std::size_t n, float factor, Array to,
            double* squares);
  // to = x, then to *= factor. The two may overlap only where n is at most kOfThread.
  void copy(CUstream_st* stream, std::size_t n, ConstArray x, float factor, Array to);
  static constexpr std::size_t kOfThread = 4;

 private:
  Device& device_;
  CUfunc_st *add_, *mean_, *copy_;
};

}  // namespace sluice::kernels
