#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace sluice::engine {

using UnitId = std::uint32_t;
using ParameterId = std::uint32_t;  // in registration order over all units

// Units that follow each other: first ... end - 1.
struct UnitRange {
  UnitId first = 0, end = 0;
  std::size_t size() const { return end - first; }
  bool operator==(const UnitRange&) const = default;
};

struct ParameterSpec {
  std::string name;  // logical name, as in a checkpoint
  std::vector<std::size_t> shape;
  std::uint32_t group = 0;  // whose settings a step applies to it
  int uses = 1;             // how often one micro-batch uses it: 2 for a tied embedding
  // A large parameter may span several units that follow each other, each of which has a span of it and
  // nothing else. Spans follow each other too; all but the last have a multiple of kSpanGrain elements.
  // span_elements 0: it lies in its unit as a whole.
  std::size_t span_first = 0, span_elements = 0;
  bool by_elements = false;      // an optimizer of matrices (Muon) leaves it to AdamW: embeddings, heads
  std::size_t elements() const;  // that its unit has
  std::size_t whole_elements() const;
  bool continues() const { return span_first > 0; }  // the span before
};

// The parameters that are fetched and released together.
struct UnitSpec {
  std::string name;
  std::vector<ParameterSpec> parameters;
  bool trainable = true;      // else frozen: it has no gradient, no master and no optimizer state
  Dtype dtype = Dtype::kF32;  // of its parameters
};

inline constexpr std::size_t kParameterAlignment = 1024;  // elements: where a parameter begins in its unit
inline constexpr std::size_t kSpanGrain = std::size_t{1} << 20;  // elements: whole huge pages of every type
inline constexpr std::size_t kUnitAlignment = 4096;  // elements: what a unit is padded to, whole disk blocks
// Elements: what the chunks of a streamed update are multiples of. A chunk's part of a gradient's record is
// then a whole number of the record's blocks.
inline constexpr std::size_t kChunkGrain = std::size_t{512} << 10;

// Where each parameter lies: flat, aligned, in registration order.
class Layout {
 public:
  struct Place {
    UnitId unit;
    std::size_t offset;  // elements from the start of the unit
    std::size_t elements;
  };
  // Throws Error(kInvalidArgument) for an empty unit, a zero dimension, a name that stands twice, or spans
  // that do not make up their parameter.
  explicit Layout(std::vector<UnitSpec> units);

  const std::vector<UnitSpec>& units() const { return units_; }
  bool trainable(UnitId unit) const { return units_[unit].trainable; }
  Dtype dtype(UnitId unit) const { return units_[unit].dtype; }
  std::size_t unit_elements(UnitId unit) const { return unit_elements_[unit]; }  // padded to kUnitAlignment
  std::size_t unit_bytes(UnitId unit) const { return unit_elements_[unit] * size_of(units_[unit].dtype); }
  std::size_t parameters() const { return places_.size(); }
  const Place& place(ParameterId parameter) const { return places_[parameter]; }
  const ParameterSpec& spec(ParameterId parameter) const;
  // The units that the unit's parameter spans; it alone, where its parameters lie in it as a whole.
  UnitRange siblings(UnitId unit) const { return siblings_[unit]; }
  // The parameter's first span: it has what is kept once of all spans.
  ParameterId first_span(ParameterId parameter) const;
  // The parameter's number among the logical ones, of which a parameter that spans units is one.
  std::size_t logical_index(ParameterId parameter) const { return logical_[parameter]; }
  ParameterId first_parameter(UnitId unit) const { return first_parameter_[unit]; }
  ParameterId end_parameter(UnitId unit) const { return first_parameter_[unit + 1]; }

 private:
  std::vector<UnitSpec> units_;
  std::vector<std::size_t> unit_elements_;
  std::vector<UnitRange> siblings_;
  std::vector<ParameterId> first_parameter_;
  std::vector<Place> places_;
  std::vector<std::size_t> logical_;  // by parameter
};

// Elements of a unit's gradient buffer for one use (0: all parameters; k: those with more than k uses),
// padded as a unit.
std::size_t use_elements(const Layout& layout, UnitId unit, int use);

}  // namespace sluice::engine
