#include "kernels/device_reduce.h"

#include "core/bytes.h"
#include "core/device_array.h"
#include "kernels/cuda/reduce.h"
#include "kernels/simd.h"

namespace sluice::kernels {

DeviceSquares::DeviceSquares(Device& device)
    : device_(device),
      kernel_(device.kernel("sluice_square_sums")),
      check_(device.kernel("sluice_finite_check")) {}

std::size_t DeviceSquares::sum_bytes(std::size_t n) { return divide_up(n, kGridBlock) * sizeof(double); }

void DeviceSquares::queue(CUstream_st* stream, std::size_t n, ConstArray values, DeviceAddress sums) {
  require_float({values});
  check_alignment(values);
  ensure(sums % sizeof(double) == 0, "sums for a GPU begin at an address that is no multiple of {}",
         sizeof(double));
  if (n == 0) return;
  const std::size_t blocks = divide_up(n, kSquareElements);
  ensure(blocks <= INT32_MAX, "a sum over {} elements in one call is more than a GPU takes", n);
  const GpuSquares arguments{n, values.data, reinterpret_cast<double*>(sums), values.type};
  device_.launch(stream, kernel_, static_cast<unsigned>(blocks), kSquareThreads, &arguments);
}

void DeviceSquares::check(CUstream_st* stream, std::size_t sum_count, DeviceAddress sums,
                          DeviceAddress found) {
  ensure(sums % sizeof(double) == 0 && found % sizeof(std::uint32_t) == 0,
         "sums on a GPU, or what is found of them, begin at an address that is not aligned");
  if (sum_count == 0) return;
  const std::size_t blocks = divide_up(sum_count, kCheckThreads);
  ensure(blocks <= INT32_MAX, "a check of {} sums in one call is more than a GPU takes", sum_count);
  const GpuFiniteCheck arguments{sum_count, reinterpret_cast<const double*>(sums),
                                 reinterpret_cast<std::uint32_t*>(found)};
  device_.launch(stream, check_, static_cast<unsigned>(blocks), kCheckThreads, &arguments);
}

}  // namespace sluice::kernels
