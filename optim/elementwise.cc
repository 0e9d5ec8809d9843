#include "optim/elementwise.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/error.h"
#include "kernels/simd.h"

namespace sluice::optim {
namespace {

static_assert(kernels::kLoopGrain % kScaleBlock == 0);

// All of it.
Piece piece_of(const Span& span, const RoundingWords& words) {
  Piece piece;
  piece.count = span.count;
  piece.gradient = span.gradient;
  piece.master = span.master;
  piece.parameter = span.parameter;
  piece.words = words;
  std::copy(span.state.begin(), span.state.end(), piece.state.begin());
  return piece;
}

}  // namespace

Piece Piece::part(std::size_t at, std::size_t elements) const {
  Piece piece = *this;
  piece.first += at;
  piece.count = elements;
  piece.gradient = gradient.at(at);
  if (master != nullptr) piece.master += at;
  if (parameter.data != nullptr) piece.parameter = parameter.at(at);
  piece.words.first_index += at;
  for (StatePart& array : piece.state) {
    if (array.values.data != nullptr) array.values = array.values.at(at);
    if (array.scales != nullptr) array.scales += at / kScaleBlock;
  }
  return piece;
}

Elementwise::Elementwise(std::string name, const Storage& storage, const Coefficients& own)
    : name_(std::move(name)), storage_(storage), own_(own) {
  const std::vector<std::string> names = state_type_names();
  if (std::find(names.begin(), names.end(), state_type_name(storage.state)) == names.end())
    fail(ErrorCode::kInvalidArgument, "{}: its state is to be {}; it may be {}", name_,
         name_of(storage.state), fmt::join(names, ", "));
}

Json Elementwise::settings() const {
  Json all = arithmetic();
  if (storage_.state != Dtype::kF32) all["state"] = state_type_name(storage_.state);
  if (!storage_.master) all["master"] = "none";
  return all;
}

void Elementwise::for_each_piece(Threads& threads, const Hyperparameters& hyperparameters, const Span& span,
                                 const std::function<void(const Piece&)>& body) const {
  check_span(hyperparameters, span);
  check_values(span);
  const RoundingWords words = {storage_.seed, span.parameter_index << 40 ^ hyperparameters.step,
                               span.first_index};
  const Piece all = piece_of(span, words);
  threads.parallel_for(span.count, kernels::kLoopGrain,
                       [&](std::size_t begin, std::size_t end) { body(all.part(begin, end - begin)); });
}

void Elementwise::check_span(const Hyperparameters& hyperparameters, const Span& span) const {
  ensure(hyperparameters.step >= 1, "{} counts steps from 1 and was given step 0", name_);
  const std::vector<StateArray> state = this->state();
  ensure(span.state.size() == state.size(), "{} keeps {} arrays of state; the span has {}", name_,
         state.size(), span.state.size());
  for (std::size_t i = 0; i < state.size(); ++i) {
    const StatePart& part = span.state[i];
    ensure(state[i].map == (i == 0 ? CodeMap::kSigned : CodeMap::kUnsigned),
           "{} keeps '{}' in codes of another sign than array {} has", name_, state[i].name, i);
    ensure(part.values.type == state[i].type, "{} keeps '{}' in {}; the span has {}", name_, state[i].name,
           state_type_name(state[i].type), name_of(part.values.type));
    ensure(part.values.type != Dtype::kU8 || part.scales != nullptr || span.count == 0,
           "{} keeps '{}' in codes, and the span has no scales", name_, state[i].name);
    ensure(part.values.type != Dtype::kU8 || span.first_index % kScaleBlock == 0,
           "{} keeps '{}' in codes, and the span begins in the middle of a block, at element {}", name_,
           state[i].name, span.first_index);
  }
  kernels::require_float({span.gradient, span.parameter});
}

void Elementwise::check_values(const Span& span) const {
  ensure(span.master != nullptr || (span.parameter.data != nullptr && span.parameter.type == Dtype::kBf16),
         "{} is given neither f32 values nor bf16 ones to round stochastically", name_);
  ensure(span.master != nullptr || span.first_index % kScaleBlock == 0,
         "{} is given values to round stochastically from element {} on, which begins no block", name_,
         span.first_index);
}

void Elementwise::check_share(std::string_view name, double value) const {
  if (!(value >= 0 && value < 1))
    fail(ErrorCode::kInvalidArgument, "{}: {} is {}; it must be at least 0 and below 1", name_, name, value);
}

void Elementwise::check_size(std::string_view name, double value, bool zero) const {
  const auto single = static_cast<float>(value);
  const bool valid = std::isfinite(single) && (single > 0 || (zero && value == 0));
  if (!valid)
    fail(ErrorCode::kInvalidArgument, "{}: {} is {}; it must be finite and {}, and so as a number of 32 bits",
         name_, name, value, zero ? "0 or more" : "above 0");
}

void Elementwise::check_momentum(std::string_view name, double value, double own) const {
  check_share(name, value);
  if ((value == 0) != (own == 0))
    fail(ErrorCode::kInvalidArgument,
         "{}: {} is {}, and it was made with {}; the array that it needs is made at the start or not at all, "
         "so that it cannot become {} later",
         name_, name, value, own, own == 0 ? "other than 0" : "0");
}

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
