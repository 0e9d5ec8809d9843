#include "engine/step/device_gradients.h"

namespace sluice::engine {

DeviceGradients::DeviceGradients(const Layout& layout, DeviceWork& gpu)
    : layout_(layout), gpu_(gpu), sum_(gpu.device()), squares_(gpu.device()) {
  std::size_t end = 0;
  for (ParameterId p = 0; p < layout.parameters(); ++p) {
    offsets_.push_back(end);
    end += kernels::DeviceSquares::sum_bytes(layout.location(p).elements);
  }
  found_ = end;
}

std::size_t DeviceGradients::sum_bytes(const Layout& layout) {
  std::size_t bytes = 0;
  for (ParameterId p = 0; p < layout.parameters(); ++p)
    bytes += kernels::DeviceSquares::sum_bytes(layout.location(p).elements);
  return bytes + layout.units().size() * sizeof(std::uint32_t);
}

void DeviceGradients::start(allocator::Ledger& ledger) {
  const std::size_t bytes = sum_bytes(layout_);
  on_gpu_ = ComputeRegion(ledger, &gpu_, allocator::Purpose::kWorkspace, bytes);
  on_host_ = RegisteredRegion(ledger, gpu_.device(), allocator::Purpose::kWorkspace, bytes);
  // Each unit's number is a piece of its own: an update that reads it holds up nothing else.
  for (std::byte* const data : {on_gpu_.data(), on_host_.data()}) {
    if (found_ > 0) gpu_.add({data, found_}, found_);
    gpu_.add({data + found_, bytes - found_}, sizeof(std::uint32_t));
  }
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

const std::uint32_t* DeviceGradients::check(UnitId unit, const std::function<bool(ParameterId)>& has,
                                            bool for_cpu) {
  std::byte* const found = on_gpu_.data() + found_ + unit * sizeof(std::uint32_t);
  CUstream_st* const stream = gpu_.client();
  const DeviceWork::Memory written{found, sizeof(std::uint32_t)};
  const auto address = reinterpret_cast<DeviceAddress>(found);
  const ParameterId first = layout_.first_parameter(unit), end = layout_.end_parameter(unit);
  const std::size_t from = offsets_[first], to = end < offsets_.size() ? offsets_[end] : found_;
  const DeviceWork::Memory sums{on_gpu_.data() + from, to - from};
  gpu_.queue(stream, {&sums, 1}, {&written, 1}, [&] {
    gpu_.device().fill(stream, address, std::byte{0}, sizeof(std::uint32_t));
    for (ParameterId p = first; p < end; ++p)
      if (has(p))
        squares_.check(stream, sums_of(p).size() / sizeof(double),
                       reinterpret_cast<DeviceAddress>(sums_of(p).data()), address);
  });
  if (!for_cpu) return reinterpret_cast<const std::uint32_t*>(found);
  std::byte* const on_host = on_host_.data() + (found - on_gpu_.data());
  gpu_.copy_out(on_host, written);
  return reinterpret_cast<const std::uint32_t*>(on_host);
}

void DeviceGradients::fetch_squares() {
  if (found_ == 0) return;
  gpu_.copy_out(on_host_.data(), {on_gpu_.data(), found_});
  gpu_.wait({on_host_.data(), found_}, DeviceWork::Use::kRead);
}

kernels::SquareSum DeviceGradients::squares(ParameterId parameter) const {
  const std::size_t n = layout_.location(parameter).elements;
  const auto* const sums = reinterpret_cast<const double*>(on_host_.data() + offsets_[parameter]);
  return kernels::square_sum(layout_.spec(parameter).span_first,
                             {sums, kernels::DeviceSquares::sum_bytes(n) / sizeof(double)});
}

}  // namespace sluice::engine
