#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace sluice::engine {

using UnitId = std::uint32_t;
using ParameterId = std::uint32_t;  // numbered in registration order over all units

// Consecutive units: first ... end - 1.
struct UnitRange {
  UnitId first = 0, end = 0;
  std::size_t size() const { return end - first; }
  bool operator==(const UnitRange&) const = default;
};

struct ParameterSpec {
  std::string name;  // logical name, as in a checkpoint
  std::vector<std::size_t> shape;
  std::uint32_t group = 0;  // the parameter group whose settings a step applies
  int uses = 1;             // uses per micro-batch: 2 where embedding and head are tied
  // A large parameter may span several consecutive units. Each of these units then has one span of it and
  // nothing else. All spans but the last have a multiple of kSpanGrain elements. Where span_elements is 0 the
  // unit has the whole parameter.
  std::size_t span_first = 0, span_elements = 0;
  bool by_elements = false;  // Muon leaves it to AdamW, as it should embeddings and heads
  // Whether a micro-batch's gradient of the last use is 0 but in at most as many rows as the micro-batch has
  // tokens, as an embedding's is.
  bool by_tokens = false;
  std::size_t elements() const;  // of the span, or of the whole parameter
  std::size_t whole_elements() const;
  bool continues() const { return span_first > 0; }  // the previous unit has the previous span
};

// The parameters that are fetched and released together.
struct UnitSpec {
  std::string name;
  std::vector<ParameterSpec> parameters;
  bool trainable = true;      // a frozen unit has no gradient, no master and no optimizer state
  Dtype dtype = Dtype::kF32;  // of all its parameters
  // The index in the model of its first parameter, where the layout has only some of the model's units.
  // nullopt: it follows the unit before. See Layout::logical_index().
  std::optional<std::size_t> index = {};
};

// In elements: parameters begin at multiples in their unit, and units are padded to multiples, which are
// whole disk blocks of every type.
inline constexpr std::size_t kParameterAlignment = 1024, kUnitAlignment = 4096;
inline constexpr std::size_t kSpanGrain = std::size_t{1} << 20;  // elements; whole huge pages of every type
// Chunks of a streamed update are multiples of this many elements, so that the gradient of a chunk is a whole
// number of its record's blocks.
inline constexpr std::size_t kChunkGrain = std::size_t{512} << 10;

// The position of each parameter in its unit: flat, aligned, in registration order. Thread rule: it never
// changes, and any thread may read it.
class Layout {
 public:
  struct Location {
    UnitId unit;
    std::size_t offset;  // in elements, from the start of the unit
    std::size_t elements;
  };
  // Throws Error(kInvalidArgument) for a unit without parameters, a dimension of 0, a name that is used
  // twice, an index that does not ascend, or spans that do not make up their parameter.
  explicit Layout(std::vector<UnitSpec> units);

  const std::vector<UnitSpec>& units() const { return units_; }
  bool trainable(UnitId unit) const { return units_[unit].trainable; }
  Dtype dtype(UnitId unit) const { return units_[unit].dtype; }
  std::size_t unit_elements(UnitId unit) const { return unit_elements_[unit]; }  // padded to kUnitAlignment
  std::size_t unit_bytes(UnitId unit) const { return unit_elements_[unit] * size_of(units_[unit].dtype); }
  std::size_t parameters() const { return locations_.size(); }
  const Location& location(ParameterId parameter) const { return locations_[parameter]; }
  const ParameterSpec& spec(ParameterId parameter) const;
  // The units that the parameter of this unit spans, or this unit alone where it has whole parameters.
  UnitRange siblings(UnitId unit) const { return siblings_[unit]; }
  // The first span of the parameter, which has what is kept once for all spans.
  ParameterId first_span(ParameterId parameter) const;
  // The parameter's index in the model, where a parameter that spans units counts once. Random numbers are
  // keyed by it, so that a part of a model has those of the whole.
  std::size_t logical_index(ParameterId parameter) const { return logical_[parameter]; }
  ParameterId first_parameter(UnitId unit) const { return first_parameter_[unit]; }
  ParameterId end_parameter(UnitId unit) const { return first_parameter_[unit + 1]; }

 private:
  std::vector<UnitSpec> units_;
  std::vector<std::size_t> unit_elements_;
  std::vector<UnitRange> siblings_;
  std::vector<ParameterId> first_parameter_;
  std::vector<Location> locations_;
  std::vector<std::size_t> logical_;  // the logical index of each parameter
};

// The elements of a unit's gradient buffer for one use, with padding. Use 0 has all parameters; use k has
// those that are used more than k times.
std::size_t use_elements(const Layout& layout, UnitId unit, int use);
// The position in that buffer at which the unit's elements from this one on begin.
std::size_t in_use(const Layout& layout, UnitId unit, int use, std::size_t element);

}  // namespace sluice::engine
