#include "kernels/device_sum.h"

#include "core/device_array.h"
#include "kernels/cuda/sum.h"
#include "kernels/simd.h"

namespace sluice::kernels {

static_assert(DeviceSum::kOfThread == kSumOwn && DeviceSum::kMostRanks == kMostMeanRanks);

DeviceSum::DeviceSum(Device& device)
    : device_(device),
      add_(device.kernel("sluice_add")),
      mean_(device.kernel("sluice_mean")),
      copy_(device.kernel("sluice_scaled_copy")) {}

void DeviceSum::add(CUstream_st* stream, std::size_t n, ConstArray x, bool accumulate, float factor, Array to,
                    double* squares) {
  require_float({x, to});
  ensure(to.type == Dtype::kF32 || (!accumulate && to.type == x.type), "a sum is not f32");
  check_alignment(x);
  check_alignment(to);
  check_alignment(squares, sizeof(double), "f64");
  if (n == 0) return;
  const GpuAddition arguments{n,          x.data, to.data, squares, x.type, to.type == x.type && !accumulate,
                              accumulate, factor};
  device_.launch(stream, add_, launch_blocks(n, kAddElements), kAddThreads, &arguments);
}

void DeviceSum::mean(CUstream_st* stream, std::span<const ConstArray> of_ranks, std::size_t n, float factor,
                     Array to, double* squares) {
  ensure(!of_ranks.empty() && of_ranks.size() <= kMostRanks, "a mean is of {} ranks, and is of 1 to {}",
         of_ranks.size(), kMostRanks);
  ensure(to.type == Dtype::kF32, "a mean is not f32");
  check_alignment(to);
  check_alignment(squares, sizeof(double), "f64");
  GpuMean arguments;
  arguments.count = n;
  arguments.to = static_cast<float*>(to.data);
  arguments.squares = squares;
  arguments.factor = factor;
  const auto is_packed = [](ConstArray array) {
    return reinterpret_cast<std::uintptr_t>(array.data) % (kSumOwn * size_of(array.type)) == 0;
  };
  arguments.is_packed = is_packed(to);
  for (const ConstArray& array : of_ranks) {
    require_float({array});
    check_alignment(array);
    arguments.of_ranks[arguments.ranks] = array.data;
    arguments.types[arguments.ranks++] = array.type;
    arguments.is_packed = arguments.is_packed && is_packed(array);
  }
  if (n == 0) return;
  device_.launch(stream, mean_, launch_blocks(n, kAddElements), kAddThreads, &arguments);
}

void DeviceSum::copy(CUstream_st* stream, std::size_t n, ConstArray x, float factor, Array to) {
  require_float({x, to});
  check_alignment(to);
  check_alignment(x);
  if (n == 0) return;
  const GpuScaledCopy arguments{n, x.data, to.data, x.type, to.type, factor};
  device_.launch(stream, copy_, launch_blocks(n, kCopyElements), kCopyThreads, &arguments);
}

}  // namespace sluice::kernels
