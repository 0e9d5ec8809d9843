#include "engine/machine/update_sample.h"

#include "core/bytes.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kSampleAlignment = 256, kColumns = 1024;

std::vector<UnitSpec> unit_of(std::size_t elements, Dtype dtype) {
  UnitSpec unit{"measured", {{"parameter", {elements / kColumns, kColumns}}}};
  unit.dtype = dtype;
  return {unit};
}

}  // namespace

UpdateSample::UpdateSample(const optim::Optimizer& optimizer, Dtype dtype, Dtype gradients,
                           std::size_t elements)
    : dtype_(dtype),
      gradients_(gradients),
      layout_(unit_of(elements, dtype)),
      format_(layout_, optimizer, round_up(elements, kChunkGrain)) {}

std::size_t UpdateSample::parameter_offset() const { return round_up(format_.bytes(0), kSampleAlignment); }

std::size_t UpdateSample::gradient_offset() const {
  return parameter_offset() + round_up(elements() * size_of(dtype_), kSampleAlignment);
}

optim::Span UpdateSample::span(std::byte* memory) const {
  const Array values = parameter(memory);
  optim::Span span;
  span.whole.kind = kind();
  span.count = elements();
  span.gradient = gradient(memory);
  if (dtype_ != Dtype::kF32) span.parameter = values;
  if (format_.has_master(0))
    span.master = format_.part(memory, 0, 0, 0).values.f32();
  else if (dtype_ == Dtype::kF32)
    span.master = values.f32();
  for (std::size_t array = format_.masters(); array < format_.arrays(); ++array)
    span.state.push_back(format_.has(array, 0) ? format_.part(memory, 0, 0, array)
                                               : optim::StatePart{{nullptr, format_.array(array).type}});
  return span;
}

}  // namespace sluice::engine
