#include "optim/elementwise.h"

#include <algorithm>

#include "core/error.h"
#include "kernels/simd.h"

namespace sluice::optim {
namespace {

static_assert(kernels::kLoopGrain % kScaleBlock == 0);

SpanRange range_of(const Span& span, const RoundingWords& words) {
  SpanRange range;
  range.count = span.count;
  range.gradient = span.gradient;
  range.master = span.master;
  range.parameter = span.parameter;
  range.words = words;
  std::copy(span.state.begin(), span.state.end(), range.state.begin());
  return range;
}

}  // namespace

SpanRange SpanRange::part(std::size_t at, std::size_t elements) const {
  SpanRange range = *this;
  range.first += at;
  range.count = elements;
  range.gradient = gradient.at(at);
  if (master != nullptr) range.master += at;
  if (parameter.data != nullptr) range.parameter = parameter.at(at);
  range.words.first_index += at;
  for (StatePart& array : range.state) {
    if (array.values.data != nullptr) array.values = array.values.at(at);
    if (array.scales != nullptr) array.scales += at / kScaleBlock;
  }
  return range;
}

RoundingWords rounding_words(const Optimizer& optimizer, const Hyperparameters& hyperparameters,
                             const Span& span) {
  return {optimizer.storage().seed, span.parameter_index << 40 ^ hyperparameters.step, span.first_index};
}

void for_each_range(Threads& threads, const Optimizer& optimizer, const Hyperparameters& hyperparameters,
                    const Span& span, const std::function<void(const SpanRange&)>& body) {
  check_span(optimizer, hyperparameters, span);
  check_values(optimizer, span);
  const SpanRange all = range_of(span, rounding_words(optimizer, hyperparameters, span));
  threads.parallel_for(span.count, kernels::kLoopGrain,
                       [&](std::size_t begin, std::size_t end) { body(all.part(begin, end - begin)); });
}

void check_span(const Optimizer& optimizer, const Hyperparameters& hyperparameters, const Span& span) {
  const std::string& name = optimizer.name();
  ensure(hyperparameters.step >= 1, "{} was given step 0, but steps are counted from 1", name);
  const std::vector<StateArray> state = optimizer.state();
  ensure(span.state.size() == state.size(), "{} keeps {} arrays of state, but the span has {}", name,
         state.size(), span.state.size());
  for (std::size_t i = 0; i < state.size(); ++i) {
    const StatePart& part = span.state[i];
    ensure(state[i].map == (i == 0 ? CodeMap::kSigned : CodeMap::kUnsigned),
           "{} keeps '{}' in codes of another sign than array {} can have", name, state[i].name, i);
    ensure(part.values.type == state[i].type, "{} keeps '{}' in {}, but the span has it in {}", name,
           state[i].name, state_type_name(state[i].type), name_of(part.values.type));
    ensure(part.values.type != Dtype::kU8 || part.scales != nullptr || span.count == 0,
           "{} keeps '{}' in codes, but the span has no scales", name, state[i].name);
    ensure(part.values.type != Dtype::kU8 || span.first_index % kScaleBlock == 0,
           "{} keeps '{}' in codes, but the span begins in the middle of a block, at element {}", name,
           state[i].name, span.first_index);
  }
  kernels::require_float({span.gradient, span.parameter});
}

void check_values(const Optimizer& optimizer, const Span& span) {
  const std::string& name = optimizer.name();
  ensure(span.master != nullptr || (span.parameter.data != nullptr && span.parameter.type == Dtype::kBf16),
         "{} was given neither f32 values nor bf16 ones to round stochastically", name);
  ensure(span.master != nullptr || span.first_index % kScaleBlock == 0,
         "{} was given values to round stochastically from element {} on, which does not begin a block", name,
         span.first_index);
}

std::optional<ElementwiseUpdate> Optimizer::elementwise(const Hyperparameters&) const { return std::nullopt; }

GradientRule gradient_rule(const Hyperparameters& h) {
  GradientRule rule;
  rule.factor = static_cast<float>(h.gradient_factor);
  if (h.clip_value > 0) rule.bound = static_cast<float>(h.clip_value);
  return rule;
}

double power(double base, std::uint64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return result;
}

}  // namespace sluice::optim
