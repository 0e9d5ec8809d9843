#include "kernels/cuda/reduce.h"

#include "core/cuda/kernel.h"

// Sums of squares with the bits of kernels/reduce.cc. A thread is one lane of a block of the grid, so that a
// warp has two of these blocks.
namespace sluice::kernels {
namespace gpu {

// A square of an f32 value is exact in f64, so that a multiplication and an addition give the bits of the
// CPU's fused ones.
template <class T, class Widen>
__device__ __forceinline__ double sum_of_lane(const T* values, std::uint64_t begin, std::uint64_t end, Widen widen) {
  double sum = 0;
  for (std::uint64_t i = begin; i < end; i += kSquareLanes) {
    const double value = widen(values[i]);
    sum += value * value;
  }
  return sum;
}

__device__ __forceinline__ double sum_of_lane(const GpuSquares& of, std::uint64_t begin, std::uint64_t end) {
  if (of.type == Dtype::kF32)
    return sum_of_lane(static_cast<const float*>(of.values), begin, end, [](float value) { return value; });
  if (of.type == Dtype::kBf16)
    return sum_of_lane(static_cast<const Bf16*>(of.values), begin, end, [](Bf16 value) { return to_f32(value); });
  return sum_of_lane(static_cast<const F16*>(of.values), begin, end, [](F16 value) { return to_f32(value); });
}

}  // namespace gpu

SLUICE_KERNEL(sluice_square_sums, GpuSquares) {
  constexpr std::uint64_t kBlocks = kSquareThreads / kSquareLanes;
  const std::uint64_t block = blockIdx.x * kBlocks + threadIdx.x / kSquareLanes, lane = threadIdx.x % kSquareLanes;
  const std::uint64_t begin = block * kGridBlock, next = begin + kGridBlock;
  const std::uint64_t end = next < arguments.count ? next : arguments.count;
  double sum = gpu::sum_of_lane(arguments, begin + lane, end);
  // Neighbours first. Both of two lanes add the same two numbers, and all threads of a warp take part.
  for (unsigned lanes = 1; lanes < kSquareLanes; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  if (lane == 0 && begin < arguments.count) arguments.sums[block] = sum;
}

// All threads that find one write the same.
SLUICE_KERNEL(sluice_finite_check, GpuFiniteCheck) {
  const std::uint64_t i = std::uint64_t{blockIdx.x} * kCheckThreads + threadIdx.x;
  if (i >= arguments.count) return;
  const double sum = arguments.sums[i];
  if (!(sum - sum == 0)) *arguments.found = 1;
}

}  // namespace sluice::kernels
