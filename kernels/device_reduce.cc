#include "kernels/device_reduce.h"

#include "core/device_array.h"
#include "kernels/cuda/reduce.h"

namespace sluice::kernels {

static_assert(kMostLeaves == std::uint64_t{1} << DeviceSquares::kMostLevel);

DeviceSquares::DeviceSquares(Device& device)
    : device_(device),
      nodes_(device.kernel("sluice_node_sums")),
      check_(device.kernel("sluice_finite_check")) {}

void DeviceSquares::add_up(CUstream_st* stream, std::size_t count, const SumNode* nodes,
                           std::size_t leaf_count, const double* leaves, double* sums) {
  check_alignment(nodes, alignof(SumNode), "nodes");
  check_alignment(leaves, sizeof(double), "f64");
  check_alignment(sums, sizeof(double), "f64");
  if (count == 0) return;
  const GpuNodeSums arguments{count, leaf_count, nodes, leaves, sums};
  device_.launch(stream, nodes_, launch_blocks(count, kNodeThreads / kWarpThreads), kNodeThreads, &arguments);
}

void DeviceSquares::check(CUstream_st* stream, std::size_t count, const double* sums, std::uint32_t* found) {
  check_alignment(sums, sizeof(double), "f64");
  check_alignment(found, sizeof(std::uint32_t), "u32");
  if (count == 0) return;
  const GpuFiniteCheck arguments{count, sums, found};
  device_.launch(stream, check_, launch_blocks(count, kCheckThreads), kCheckThreads, &arguments);
}

}  // namespace sluice::kernels
