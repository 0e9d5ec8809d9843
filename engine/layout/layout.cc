#include "engine/layout/layout.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <unordered_set>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::engine {
namespace {

constexpr std::size_t kMostElements = std::size_t{1} << 44;  // sizes in bytes then stay far from overflow

void check(const ParameterSpec& parameter) {
  std::size_t elements = 1;
  for (const std::size_t dimension : parameter.shape)
    if (__builtin_mul_overflow(elements, dimension, &elements) || elements > kMostElements)
      fail(ErrorCode::kInvalidArgument, "parameter '{}' has more than {} elements, the most that can be held",
           parameter.name, kMostElements);
  if (elements == 0 || parameter.uses < 1)
    fail(ErrorCode::kInvalidArgument, "parameter '{}' has no elements or no uses", parameter.name);
}

[[noreturn]] void fail_for_span(const ParameterSpec& span, std::string_view problem) {
  fail(ErrorCode::kInvalidArgument, "the span of '{}' at element {} ({} elements) {}", span.name,
       span.span_first, span.span_elements, problem);
}

// Checks a unit that has a span. unit_before: null for the first unit.
void check_span(const UnitSpec& unit, const UnitSpec* unit_before) {
  const ParameterSpec& span = unit.parameters.front();
  const ParameterSpec* before = unit_before == nullptr ? nullptr : &unit_before->parameters.front();
  if (unit.parameters.size() > 1) fail_for_span(span, "shares its unit; give it a unit of its own");
  check(span);
  if (span.span_elements == 0) fail_for_span(span, "has no elements");
  if (span.span_first > span.whole_elements() || span.span_elements > span.whole_elements() - span.span_first)
    fail_for_span(span, "goes beyond the end of the parameter");
  if (span.span_first + span.span_elements < span.whole_elements() && span.span_elements % kSpanGrain != 0)
    fail_for_span(span, fmt::format("is not the last, and no multiple of {} elements", kSpanGrain));
  if (!span.continues()) return;
  if (before == nullptr || before->name != span.name ||
      before->span_first + before->span_elements != span.span_first)
    fail_for_span(span, "must follow the span that ends there, and the unit before has no such span");
  if (before->shape != span.shape || before->group != span.group || before->uses != span.uses ||
      before->by_elements != span.by_elements || unit_before->trainable != unit.trainable ||
      unit_before->dtype != unit.dtype)
    fail_for_span(span, "differs from the one before it in shape, type, group, uses or being trainable");
}

bool is_span(const UnitSpec& unit) {
  return unit.parameters.front().span_elements > 0 || unit.parameters.front().continues();
}

bool ends_early(const UnitSpec& unit) {
  const ParameterSpec& last = unit.parameters.front();
  return is_span(unit) && last.span_first + last.span_elements < last.whole_elements();
}

}  // namespace

std::size_t ParameterSpec::elements() const { return span_elements > 0 ? span_elements : whole_elements(); }

std::size_t ParameterSpec::whole_elements() const {
  return std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<>());
}

Layout::Layout(std::vector<UnitSpec> units) : units_(std::move(units)) {
  std::unordered_set<std::string> names;
  for (UnitId unit = 0; unit < units_.size(); ++unit) {
    if (units_[unit].parameters.empty())
      fail(ErrorCode::kInvalidArgument, "unit '{}' has no parameters", units_[unit].name);
    const UnitSpec* before = unit > 0 ? &units_[unit - 1] : nullptr;
    const bool continues = units_[unit].parameters.front().continues();
    if (is_span(units_[unit])) check_span(units_[unit], before);
    if (before != nullptr && ends_early(*before) && !continues)
      fail_for_span(before->parameters.front(), "ends early, and no other span follows");
    first_parameter_.push_back(static_cast<ParameterId>(locations_.size()));
    std::size_t offset = 0;
    const std::size_t next = logical_.empty() ? 0 : logical_.back() + (continues ? 0 : 1);
    std::size_t index = units_[unit].index.value_or(next);
    if (index < next)
      fail(ErrorCode::kInvalidArgument,
           "unit '{}' begins with parameter {} of the model, and the units before it have {} of them",
           units_[unit].name, index, next);
    for (const ParameterSpec& parameter : units_[unit].parameters) {
      check(parameter);
      logical_.push_back(index++);
      if (!parameter.continues() && !names.insert(parameter.name).second)
        fail(ErrorCode::kInvalidArgument, "two parameters are named '{}'", parameter.name);
      locations_.push_back({unit, offset, parameter.elements()});
      offset += round_up(parameter.elements(), kParameterAlignment);
      if (offset > kMostElements)
        fail(ErrorCode::kInvalidArgument, "unit '{}' has more than {} elements, the most that can be held",
             units_[unit].name, kMostElements);
    }
    unit_elements_.push_back(round_up(offset, kUnitAlignment));
  }
  if (!units_.empty() && ends_early(units_.back()))
    fail_for_span(units_.back().parameters.front(), "ends early, and no other span follows");
  first_parameter_.push_back(static_cast<ParameterId>(locations_.size()));
  for (UnitId first = 0, end = 0; first < units_.size(); first = end) {
    do ++end;
    while (ends_early(units_[end - 1]));
    siblings_.insert(siblings_.end(), end - first, {first, end});
  }
}

const ParameterSpec& Layout::spec(ParameterId parameter) const {
  const UnitId unit = locations_[parameter].unit;
  return units_[unit].parameters[parameter - first_parameter_[unit]];
}

ParameterId Layout::first_span(ParameterId parameter) const {
  return spec(parameter).continues() ? first_parameter_[siblings(locations_[parameter].unit).first]
                                     : parameter;
}

std::size_t use_elements(const Layout& layout, UnitId unit, int use) {
  std::size_t elements = 0;
  for (const ParameterSpec& parameter : layout.units()[unit].parameters)
    if (parameter.uses > use) elements += round_up(parameter.elements(), kParameterAlignment);
  return round_up(elements, kUnitAlignment);
}

std::size_t in_use(const Layout& layout, UnitId unit, int use, std::size_t element) {
  if (element == layout.unit_elements(unit)) return use_elements(layout, unit, use);
  std::size_t before = 0;
  for (ParameterId p = layout.first_parameter(unit); p < layout.end_parameter(unit); ++p) {
    const std::size_t begin = layout.location(p).offset;
    if (begin >= element) break;
    const std::size_t room = round_up(layout.location(p).elements, kParameterAlignment);
    if (layout.spec(p).uses > use) before += std::min(room, element - begin);
  }
  return before;
}

}  // namespace sluice::engine
