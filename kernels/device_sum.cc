#include "kernels/device_sum.h"

#include "core/bytes.h"
#include "core/device_array.h"
#include "kernels/cuda/sum.h"
#include "kernels/simd.h"

namespace sluice::kernels {

DeviceSum::DeviceSum(Device& device)
    : device_(device), add_(device.kernel("sluice_add")), copy_(device.kernel("sluice_scaled_copy")) {}

void DeviceSum::launch(CUstream_st* stream, CUfunc_st* kernel, std::size_t n, const void* arguments) {
  if (n == 0) return;
  const std::size_t blocks = divide_up(n, kSumElements);
  ensure(blocks <= INT32_MAX, "{} elements in one call are more than a GPU takes", n);
  device_.launch(stream, kernel, static_cast<unsigned>(blocks), kSumThreads, arguments);
}

void DeviceSum::add(CUstream_st* stream, std::size_t n, ConstArray x, bool accumulate, float factor,
                    float* to) {
  require_float({x});
  check_alignment(x);
  check_alignment({to, Dtype::kF32});
  const GpuAddition arguments{n, x.data, to, x.type, accumulate, factor};
  launch(stream, add_, n, &arguments);
}

void DeviceSum::copy(CUstream_st* stream, std::size_t n, const float* x, float factor, Array to) {
  require_float({to});
  check_alignment(to);
  check_alignment({x, Dtype::kF32});
  const GpuScaledCopy arguments{n, x, to.data, to.type, factor};
  launch(stream, copy_, n, &arguments);
}

}  // namespace sluice::kernels
