#pragma once
#include "engine/layout/layout.h"
#include "engine/layout/state_format.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// A matrix whose update is measured. REQUIRES: elements is a multiple of 1,024. For an optimizer with rounds
// the caller adds what they need of the whole matrix to the span.
class UpdateSample {
 public:
  UpdateSample(const optim::Optimizer& optimizer, Dtype dtype, Dtype gradients, std::size_t elements);
  std::size_t elements() const { return layout_.unit_elements(0); }
  optim::Kind kind() const { return {layout_.spec(0).shape}; }  // valid as long as this object
  std::size_t bytes() const { return gradient_offset() + elements() * size_of(gradients_); }
  double bytes_an_element() const { return format_.update_bytes(0, 0); }  // moved by its update
  std::size_t state_bytes() const { return format_.bytes(0); }            // at the beginning of `memory`
  // Describes the update of what is in `memory`, which it does not access: it may be GPU memory.
  optim::Span span(std::byte* memory) const;
  Array parameter(std::byte* memory) const { return {memory + parameter_offset(), dtype_}; }
  Array gradient(std::byte* memory) const { return {memory + gradient_offset(), gradients_}; }

 private:
  std::size_t parameter_offset() const;
  std::size_t gradient_offset() const;
  Dtype dtype_, gradients_;
  Layout layout_;
  StateFormat format_;
};

}  // namespace sluice::engine
