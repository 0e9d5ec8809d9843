#include "optim/elementwise.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "kernels/simd.h"
#include "optim/stochastic.h"

namespace sluice::optim {
namespace {

constexpr std::size_t kWidened = 1024;  // elements that stay in the processor's cache
static_assert(kWidened % kScaleBlock == 0 && kernels::kLoopGrain % kScaleBlock == 0);

Piece piece_of(const Span& span, std::size_t begin, std::size_t end) {
  Piece piece;
  piece.first = begin;
  piece.count = end - begin;
  piece.gradient = span.gradient.at(begin);
  if (span.master != nullptr) piece.master = span.master + begin;
  if (span.parameter.data != nullptr) piece.parameter = span.parameter.at(begin);
  for (std::size_t i = 0; i < span.state.size(); ++i) piece.state[i] = span.state[i].values.at(begin);
  return piece;
}

// `at`: where the piece lies in its span.
void with_codes_decoded(const std::vector<StateArray>& arrays, const Span& span, std::size_t at, Piece piece,
                        const std::function<void(const Piece&)>& body) {
  std::array<std::array<float, kWidened>, kMostArrays> wide;
  const auto each_coded = [&](const auto& action) {
    for (std::size_t i = 0; i < arrays.size(); ++i)
      if (arrays[i].type == Dtype::kU8)
        action(arrays[i].map, static_cast<std::uint8_t*>(span.state[i].values.at(at).data),
               span.state[i].scales + at / kScaleBlock, wide[i].data(), piece.state[i]);
  };
  each_coded([&](CodeMap map, const std::uint8_t* codes, const float* scales, float* values, Array& state) {
    decode(piece.count, map, codes, scales, values);
    state = {values, Dtype::kF32};
  });
  body(piece);
  each_coded([&](CodeMap map, std::uint8_t* codes, float* scales, const float* values, const Array&) {
    encode(piece.count, map, values, codes, scales);
  });
}

void with_values_widened(std::uint64_t seed, std::uint64_t step, const Span& span, std::size_t at,
                         Piece piece, const std::function<void(const Piece&)>& body) {
  const std::uint64_t stream = span.parameter_index << 40 ^ step;
  std::array<float, kWidened> wide;
  Bf16* const values = std::exchange(piece.parameter, {}).bf16();
  piece.master = wide.data();
  widen(piece.count, values, wide.data());
  body(piece);
  narrow_stochastically(piece.count, {seed, stream, span.first_index + at}, wide.data(), values);
}

}  // namespace

Elementwise::Elementwise(std::string name, const Storage& storage)
    : name_(std::move(name)), storage_(storage) {
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
  check(hyperparameters, span);
  const std::vector<StateArray> arrays = state();
  const bool as_it_lies = span.master != nullptr && storage_.state != Dtype::kU8;
  threads.parallel_for(span.count, kernels::kLoopGrain, [&](std::size_t begin, std::size_t end) {
    if (as_it_lies) return body(piece_of(span, begin, end));
    for (std::size_t at = begin; at < end; at += kWidened) {
      const Piece piece = piece_of(span, at, std::min(end, at + kWidened));
      with_codes_decoded(arrays, span, at, piece, [&](const Piece& decoded) {
        if (span.master != nullptr) return body(decoded);
        with_values_widened(storage_.seed, hyperparameters.step, span, at, decoded, body);
      });
    }
  });
}

void Elementwise::check(const Hyperparameters& hyperparameters, const Span& span) const {
  ensure(hyperparameters.step >= 1, "{} counts steps from 1 and was given step 0", name_);
  ensure(span.master != nullptr || (span.parameter.data != nullptr && span.parameter.type == Dtype::kBf16),
         "{} is given neither f32 values nor bf16 ones to round stochastically", name_);
  const std::vector<StateArray> state = this->state();
  ensure(span.state.size() == state.size(), "{} keeps {} arrays of state; the span has {}", name_,
         state.size(), span.state.size());
  for (std::size_t i = 0; i < state.size(); ++i) {
    const StatePart& part = span.state[i];
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

GradientRule gradient_rule(const Hyperparameters& h) {
  GradientRule rule;
  rule.factor = static_cast<float>(h.gradient_factor);
  if (h.clip_value > 0) rule.bound = static_cast<float>(h.clip_value);
  return rule;
}

void check_share(std::string_view optimizer, std::string_view name, double value) {
  if (!(value >= 0 && value < 1))
    fail(ErrorCode::kInvalidArgument, "{}: {} is {}; it must be at least 0 and below 1", optimizer, name,
         value);
}

double power(double base, std::uint64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return result;
}

}  // namespace sluice::optim
