#include "kernels/device_sum.h"

#include "core/bytes.h"
#include "core/device_array.h"
#include "kernels/cuda/sum.h"
#include "kernels/simd.h"

namespace sluice::kernels {
namespace {

unsigned blocks_of(std::size_t n, std::size_t elements) {
  const std::size_t blocks = divide_up(n, elements);
  ensure(blocks <= INT32_MAX, "{} elements in one call are more than a GPU takes", n);
  return static_cast<unsigned>(blocks);
}

}  // namespace

DeviceSum::DeviceSum(Device& device)
    : device_(device), add_(device.kernel("sluice_add")), copy_(device.kernel("sluice_scaled_copy")) {}

void DeviceSum::add(CUstream_st* stream, std::size_t n, ConstArray x, bool accumulate, float factor,
                    float* to, double* squares) {
  require_float({x});
  check_alignment(x);
  check_alignment({to, Dtype::kF32});
  check_alignment(squares, sizeof(double), "f64");
  if (n == 0) return;
  const GpuAddition arguments{n, x.data, to, squares, x.type, accumulate, factor};
  device_.launch(stream, add_, blocks_of(n, kAddElements), kAddThreads, &arguments);
}

void DeviceSum::copy(CUstream_st* stream, std::size_t n, const float* x, float factor, Array to) {
  require_float({to});
  check_alignment(to);
  check_alignment({x, Dtype::kF32});
  if (n == 0) return;
  const GpuScaledCopy arguments{n, x, to.data, to.type, factor};
  device_.launch(stream, copy_, blocks_of(n, kCopyElements), kCopyThreads, &arguments);
}

}  // namespace sluice::kernels
