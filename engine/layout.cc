#include "engine/layout.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <unordered_set>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kMostElements = std::size_t{1}
                                      << 44;  // in a unit: sizes in bytes stay far from overflow

void check(const ParameterSpec& parameter) {
  std::size_t elements = 1;
  for (const std::size_t dimension : parameter.shape)
    if (__builtin_mul_overflow(elements, dimension, &elements) || elements > kMostElements)
      fail(ErrorCode::kInvalidArgument, "parameter '{}' has more than {} elements, the most that can be held",
           parameter.name, kMostElements);
  if (elements == 0 || parameter.uses < 1)
    fail(ErrorCode::kInvalidArgument, "parameter '{}' has no elements or no uses", parameter.name);
}

}  // namespace

std::size_t ParameterSpec::elements() const {
  return std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<>());
}

Layout::Layout(std::vector<UnitSpec> units) : units_(std::move(units)) {
  std::unordered_set<std::string> names;
  for (UnitId unit = 0; unit < units_.size(); ++unit) {
    if (units_[unit].parameters.empty())
      fail(ErrorCode::kInvalidArgument, "unit '{}' has no parameters", units_[unit].name);
    first_parameter_.push_back(static_cast<ParameterId>(places_.size()));
    std::size_t offset = 0;
    for (const ParameterSpec& parameter : units_[unit].parameters) {
      check(parameter);
      if (!names.insert(parameter.name).second)
        fail(ErrorCode::kInvalidArgument, "two parameters are named '{}'", parameter.name);
      places_.push_back({unit, offset, parameter.elements()});
      offset += round_up(parameter.elements(), kParameterAlignment);
      if (offset > kMostElements)
        fail(ErrorCode::kInvalidArgument, "unit '{}' has more than {} elements, the most that can be held",
             units_[unit].name, kMostElements);
    }
    unit_elements_.push_back(round_up(offset, kShardAlignment));
  }
  first_parameter_.push_back(static_cast<ParameterId>(places_.size()));
}

const ParameterSpec& Layout::spec(ParameterId parameter) const {
  const UnitId unit = places_[parameter].unit;
  return units_[unit].parameters[parameter - first_parameter_[unit]];
}

Shard Layout::shard(UnitId unit, int rank, int world) const {
  const std::size_t blocks = unit_elements_[unit] / kShardAlignment;
  const auto begin = [&](int r) {
    return blocks * static_cast<std::size_t>(r) / static_cast<std::size_t>(world) * kShardAlignment;
  };
  return {begin(rank), begin(rank + 1)};
}

std::size_t use_elements(const Layout& layout, UnitId unit, int use) {
  std::size_t elements = 0;
  for (const ParameterSpec& parameter : layout.units()[unit].parameters)
    if (parameter.uses > use) elements += round_up(parameter.elements(), kParameterAlignment);
  return round_up(elements, kShardAlignment);
}

}  // namespace sluice::engine
