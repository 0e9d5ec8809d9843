#include "kernels/cuda/reduce.h"

#include <limits>

#include "core/cuda/kernel.h"

// Sums in the order of kernels/partial_sum.h, and a check of them.
namespace sluice::kernels {
namespace gpu {

// Returns to all threads the sum over a warp, neighbours first. Two partner threads both add the same two
// numbers. All threads of a warp take part.
__device__ __forceinline__ double sum_of_warp(double value) {
  for (unsigned threads = 1; threads < kWarpThreads; threads *= 2) value += __shfl_xor_sync(0xffffffffu, value, threads);
  return value;
}

}  // namespace gpu

// Zeros stand for leaves that a warp would have beyond its node: added to sums of squares, which have no
// negative zeros, they change no bit. Thread i keeps the sum of the i-th 32 leaves; these sums are added
// next. An invalid node, such as one that was not copied yet, gives NaN, which is detected, instead of a
// fault, which would end the GPU's context.
SLUICE_KERNEL(sluice_node_sums, GpuNodeSums) {
  const std::uint64_t i = blockIdx.x * std::uint64_t{kNodeThreads / kWarpThreads} + threadIdx.x / kWarpThreads;
  if (i >= arguments.count) return;  // for the whole warp
  const SumNode node = arguments.nodes[i];
  const std::uint64_t thread = threadIdx.x % kWarpThreads, end = node.level < 64 ? std::uint64_t{1} << node.level : 0;
  const bool is_node = end > 0 && end <= kMostLeaves && end <= arguments.leaf_count && node.first <= arguments.leaf_count - end;
  double sum = std::numeric_limits<double>::quiet_NaN();
  if (is_node) {
    const double* const leaves = arguments.leaves + node.first;
    sum = 0;
    for (std::uint64_t begin = 0; begin < end; begin += kWarpThreads) {
      const double of_warp = gpu::sum_of_warp(begin + thread < end ? leaves[begin + thread] : 0);
      if (thread == begin / kWarpThreads) sum = of_warp;
    }
    sum = gpu::sum_of_warp(sum);
  }
  if (thread == 0) arguments.sums[i] = sum;
}

// All threads that find such a sum write the same value.
SLUICE_KERNEL(sluice_finite_check, GpuFiniteCheck) {
  const std::uint64_t i = std::uint64_t{blockIdx.x} * kCheckThreads + threadIdx.x;
  if (i >= arguments.count) return;
  const double sum = arguments.sums[i];
  if (!(sum - sum == 0)) *arguments.found = 1;
}

}  // namespace sluice::kernels
