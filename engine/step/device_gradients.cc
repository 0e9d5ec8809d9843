#include "engine/step/device_gradients.h"

namespace sluice::engine {

DeviceGradients::DeviceGradients(const Layout& layout, DeviceWork& gpu)
    : layout_(layout), gpu_(gpu), sum_(gpu.device()), squares_(gpu.device()) {
  std::size_t end = 0;
  for (ParameterId p = 0; p < layout.parameters(); ++p) {
    offsets_.push_back(end);
    end += kernels::DeviceSquares::sum_bytes(layout.location(p).elements);
  }
}

std::size_t DeviceGradients::sum_bytes(const Layout& layout) {
  std::size_t bytes = 0;
  for (ParameterId p = 0; p < layout.parameters(); ++p)
    bytes += kernels::DeviceSquares::sum_bytes(layout.location(p).elements);
  return bytes;
}

void DeviceGradients::start(allocator::Ledger& ledger) {
  const std::size_t bytes = sum_bytes(layout_);
  on_gpu_ = ComputeRegion(ledger, &gpu_, allocator::Purpose::kWorkspace, bytes);
  on_host_ = RegisteredRegion(ledger, gpu_.device(), allocator::Purpose::kWorkspace, bytes);
  gpu_.add({on_gpu_.data(), bytes}, bytes);
  gpu_.add({on_host_.data(), bytes}, bytes);
}

DeviceWork::Memory DeviceGradients::sums_of(ParameterId parameter) const {
  return {on_gpu_.data() + offsets_[parameter],
          kernels::DeviceSquares::sum_bytes(layout_.location(parameter).elements)};
}

void DeviceGradients::add(ParameterId parameter, float* sum, ConstArray gradient, bool accumulate,
                          float factor) {
  const std::size_t n = layout_.location(parameter).elements;
  const std::array written = {DeviceWork::Memory{reinterpret_cast<std::byte*>(sum), n * sizeof(float)},
                              sums_of(parameter)};
  CUstream_st* const stream = gpu_.client();
  gpu_.queue(stream, {}, written, [&] {
    sum_.add(stream, n, gradient, accumulate, factor, sum);
    squares_.queue(stream, n, {sum, Dtype::kF32}, reinterpret_cast<DeviceAddress>(written[1].data()));
  });
}

void DeviceGradients::read(ParameterId parameter, const float* sum, float factor, Array out) {
  const std::size_t n = layout_.location(parameter).elements;
  const DeviceWork::Memory read{reinterpret_cast<const std::byte*>(sum), n * sizeof(float)};
  CUstream_st* const stream = gpu_.client();
  gpu_.queue(stream, {&read, 1}, {}, [&] { sum_.copy(stream, n, sum, factor, out); });
}

void DeviceGradients::fetch_squares() {
  const std::size_t bytes = sum_bytes(layout_);
  gpu_.copy_out(on_host_.data(), {on_gpu_.data(), bytes});
  gpu_.wait({on_host_.data(), bytes}, DeviceWork::Use::kRead);
}

kernels::SquareSum DeviceGradients::squares(ParameterId parameter) const {
  const std::size_t n = layout_.location(parameter).elements;
  const auto* const sums = reinterpret_cast<const double*>(on_host_.data() + offsets_[parameter]);
  return kernels::square_sum(layout_.spec(parameter).span_first,
                             {sums, kernels::DeviceSquares::sum_bytes(n) / sizeof(double)});
}

}  // namespace sluice::engine
