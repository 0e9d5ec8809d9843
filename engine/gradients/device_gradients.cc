#include "engine/gradients/device_gradients.h"

#include "core/bytes.h"

namespace sluice::engine {

DeviceGradients::Places::Places(const Layout& layout, const Own& own)
    : blocks{0}, nodes{0}, units(layout.units().size()) {
  for (ParameterId p = 0; p < layout.parameters(); ++p) {
    const ElementRange all = elements_of(layout, p);
    elements.push_back(own.empty() ? all : intersection(own[layout.location(p).unit], all));
    const std::size_t first = layout.spec(p).span_first + elements[p].begin - all.begin;
    const std::size_t count = divide_up(elements[p].size(), kernels::kGridBlock);
    const auto of_parameter =
        kernels::node_levels(first / kernels::kGridBlock, count, kernels::DeviceSquares::kMostLevel);
    levels.insert(levels.end(), of_parameter.begin(), of_parameter.end());
    blocks.push_back(blocks.back() + count);
    nodes.push_back(levels.size());
  }
}

DeviceGradients::DeviceGradients(const Layout& layout, DeviceWork& gpu, Own own)
    : layout_(layout), places_(layout, own), gpu_(gpu), sum_(gpu.device()), squares_(gpu.device()) {}

std::size_t DeviceGradients::device_bytes(const Layout& layout, const Own& own) {
  const Places places(layout, own);
  return places.block_bytes() + places.host_bytes();
}

std::size_t DeviceGradients::host_bytes(const Layout& layout, const Own& own) {
  return Places(layout, own).host_bytes();
}

void DeviceGradients::start(allocator::Ledger& ledger) {
  on_gpu_ = ComputeRegion(ledger, &gpu_, allocator::Purpose::kWorkspace,
                          places_.block_bytes() + places_.host_bytes());
  on_host_ = RegisteredRegion(ledger, gpu_.device(), allocator::Purpose::kWorkspace, places_.host_bytes());
  if (places_.block_bytes() > 0) gpu_.add({on_gpu_.data(), places_.block_bytes()}, places_.block_bytes());
  for (std::byte* const data : {shared_on_gpu(), on_host_.data()}) {
    if (places_.sum_bytes() > 0) gpu_.add({data, places_.sum_bytes()}, places_.sum_bytes());
    if (places_.node_bytes() > 0)
      gpu_.add({data + places_.sum_bytes(), places_.node_bytes()}, places_.node_bytes());
    // Each unit's number is a piece of its own: an update that reads it holds up nothing else.
    gpu_.add({data + places_.found(), places_.units * sizeof(std::uint32_t)}, sizeof(std::uint32_t));
  }
  if (places_.node_bytes() == 0) return;
  auto* const nodes = reinterpret_cast<kernels::SumNode*>(on_host_.data() + places_.sum_bytes());
  std::size_t block = 0;
  for (std::size_t i = 0; i < places_.levels.size(); ++i) {
    nodes[i] = {block, places_.levels[i]};
    block += std::size_t{1} << places_.levels[i];
  }
  gpu_.copy_in(shared_on_gpu() + places_.sum_bytes(),
               {on_host_.data() + places_.sum_bytes(), places_.node_bytes()});
}

DeviceWork::Memory DeviceGradients::blocks_of(ParameterId first, ParameterId end) const {
  const std::size_t from = places_.blocks[first], to = places_.blocks[end];
  return {on_gpu_.data() + from * sizeof(double), (to - from) * sizeof(double)};
}

void DeviceGradients::add(ParameterId parameter, Array sum, ConstArray gradient, bool accumulate,
                          float factor) {
  const std::size_t n = layout_.location(parameter).elements;
  const DeviceWork::Memory blocks = blocks_of(parameter, parameter + 1);
  const std::array written = {DeviceWork::Memory{static_cast<std::byte*>(sum.data), n * size_of(sum.type)},
                              blocks};
  CUstream_st* const stream = gpu_.client();
  auto* const squares = reinterpret_cast<double*>(const_cast<std::byte*>(blocks.data()));
  gpu_.queue(stream, {}, written, [&] { sum_.add(stream, n, gradient, accumulate, factor, sum, squares); });
}

void DeviceGradients::add_to_part(ParameterId parameter, ElementRange elements, Array sum,
                                  ConstArray gradient, float factor) {
  const std::size_t bytes = elements.size() * sizeof(float);
  const DeviceWork::Memory read{static_cast<const std::byte*>(gradient.data), bytes};
  const DeviceWork::Memory all = blocks_of(parameter, parameter + 1);
  const std::size_t first = (elements.begin - places_.elements[parameter].begin) / kernels::kGridBlock;
  const DeviceWork::Memory blocks =
      all.subspan(first * sizeof(double), divide_up(elements.size(), kernels::kGridBlock) * sizeof(double));
  const std::array written = {DeviceWork::Memory{static_cast<std::byte*>(sum.data), bytes}, blocks};
  CUstream_st* const stream = gpu_.ranks();
  auto* const squares = reinterpret_cast<double*>(const_cast<std::byte*>(blocks.data()));
  gpu_.queue(stream, {&read, 1}, written,
             [&] { sum_.add(stream, elements.size(), gradient, true, factor, sum, squares); });
}

void DeviceGradients::read(ParameterId parameter, ConstArray sum, float factor, Array out) {
  const DeviceWork::Memory read = memory_of(parameter, sum);
  CUstream_st* const stream = gpu_.client();
  gpu_.queue(stream, {&read, 1}, {},
             [&] { sum_.copy(stream, layout_.location(parameter).elements, sum, factor, out); });
}

void DeviceGradients::fill_with_zeros(ParameterId parameter, Array sum) {
  const DeviceWork::Memory written = memory_of(parameter, sum);
  CUstream_st* const stream = gpu_.client();
  gpu_.queue(stream, {}, {&written, 1}, [&] {
    gpu_.device().fill(stream, reinterpret_cast<DeviceAddress>(sum.data), std::byte{0}, written.size());
  });
}

void DeviceGradients::scale(ParameterId parameter, Array sum, float factor) {
  const DeviceWork::Memory written = memory_of(parameter, sum);
  CUstream_st* const stream = gpu_.client();
  gpu_.queue(stream, {}, {&written, 1},
             [&] { sum_.copy(stream, layout_.location(parameter).elements, sum, factor, sum); });
}

// Launches go from the last elements to the first. Each writes to the upper half of what is left, where
// nothing lies that it or a later launch has yet to read. One thread converts the last few, and reads all of
// them first.
void DeviceGradients::widen(Array narrow, std::size_t n) {
  const DeviceWork::Memory memory{static_cast<std::byte*>(narrow.data), n * sizeof(float)};
  const Array wide{narrow.data, Dtype::kF32};
  CUstream_st* const stream = gpu_.client();
  gpu_.queue(stream, {}, {&memory, 1}, [&] {
    for (std::size_t end = n, from = n; end > 0; end = from) {
      from = end > kernels::DeviceSum::kOfThread ? round_up(end / 2, kernels::DeviceSum::kOfThread) : 0;
      sum_.copy(stream, end - from, narrow.at(from), 1, wide.at(from));
    }
  });
}

const std::uint32_t* DeviceGradients::check(UnitId unit, const std::function<bool(ParameterId)>& has,
                                            bool for_cpu) {
  std::byte* const found = shared_on_gpu() + places_.found() + unit * sizeof(std::uint32_t);
  auto* const number = reinterpret_cast<std::uint32_t*>(found);
  CUstream_st* const stream = gpu_.client();
  const DeviceWork::Memory written{found, sizeof *number};
  const ParameterId first = layout_.first_parameter(unit), end = layout_.end_parameter(unit);
  const DeviceWork::Memory blocks = blocks_of(first, end);
  gpu_.queue(stream, {&blocks, 1}, {&written, 1}, [&] {
    gpu_.device().fill(stream, reinterpret_cast<DeviceAddress>(found), std::byte{0}, sizeof *number);
    // The sums of consecutive parameters are one array: mostly one launch checks all of a unit's.
    for (ParameterId from = first, to = first; from < end; from = ++to) {
      while (to < end && has(to)) ++to;
      const DeviceWork::Memory sums = blocks_of(from, to);
      squares_.check(stream, sums.size() / sizeof(double), reinterpret_cast<const double*>(sums.data()),
                     number);
    }
  });
  if (!for_cpu) return number;
  std::byte* const on_host = on_host_.data() + (found - shared_on_gpu());
  gpu_.copy_out(on_host, written, DeviceWork::Flow::kNumbers);
  return reinterpret_cast<const std::uint32_t*>(on_host);
}

// The addition is queued with the copy, so that it waits for the gradients but not for the client's later
// work.
void DeviceGradients::fetch_squares() {
  if (places_.sum_bytes() == 0) return;
  std::byte* const at = shared_on_gpu();
  const DeviceWork::Memory blocks{on_gpu_.data(), places_.block_bytes()}, sums{at, places_.sum_bytes()};
  const DeviceWork::Memory nodes{at + sums.size(), places_.node_bytes()};
  gpu_.queue(gpu_.numbers(), std::array{blocks, nodes}, {&sums, 1}, [&] {
    squares_.add_up(gpu_.numbers(), places_.nodes.back(),
                    reinterpret_cast<const kernels::SumNode*>(nodes.data()), places_.blocks.back(),
                    reinterpret_cast<const double*>(blocks.data()), reinterpret_cast<double*>(at));
  });
  gpu_.copy_out(on_host_.data(), sums, DeviceWork::Flow::kNumbers);
  gpu_.wait({on_host_.data(), sums.size()}, DeviceWork::Use::kRead);
}

kernels::SquareSum DeviceGradients::squares(ParameterId parameter) const {
  const auto* const sums = reinterpret_cast<const double*>(on_host_.data());
  std::vector<kernels::PartialSum::Node> nodes;
  for (std::size_t i = places_.nodes[parameter]; i < places_.nodes[parameter + 1]; ++i)
    nodes.push_back({sums[i], places_.levels[i]});
  const std::size_t first = places_.elements[parameter].begin - elements_of(layout_, parameter).begin;
  return kernels::square_sum(layout_.spec(parameter).span_first + first, nodes);
}

}  // namespace sluice::engine
