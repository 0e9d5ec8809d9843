#include "optim/elementwise.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "kernels/simd.h"
#include "optim/stochastic.h"

namespace sluice::optim {
namespace {

Piece piece_of(const Span& span, std::size_t begin, std::size_t end) {
  Piece piece;
  piece.count = end - begin;
  piece.gradient = span.gradient.at(begin);
  if (span.master != nullptr) piece.master = span.master + begin;
  if (span.parameter.data != nullptr) piece.parameter = span.parameter.at(begin);
  for (std::size_t i = 0; i < span.state.size(); ++i) piece.state[i] = span.state[i].at(begin);
  return piece;
}

}  // namespace

Elementwise::Elementwise(std::string name, const Storage& storage)
    : name_(std::move(name)), storage_(storage) {
  if (storage.state != Dtype::kF32 && storage.state != Dtype::kBf16)
    fail(ErrorCode::kInvalidArgument, "{}: its state is to be {}; it may be f32 or bf16", name_,
         name_of(storage.state));
}

Json Elementwise::settings() const {
  Json all = arithmetic();
  if (storage_.state != Dtype::kF32) all["state"] = name_of(storage_.state);
  if (!storage_.master) all["master"] = "none";
  return all;
}

void Elementwise::for_each_piece(Threads& threads, const Hyperparameters& hyperparameters, const Span& span,
                                 const std::function<void(const Piece&)>& body) const {
  constexpr std::size_t kWidened = 1024;  // elements that stay in the processor's cache
  check(hyperparameters, span);
  threads.parallel_for(span.count, kernels::kLoopGrain, [&](std::size_t begin, std::size_t end) {
    if (span.master != nullptr) return body(piece_of(span, begin, end));
    const std::uint64_t stream = span.parameter_index << 40 ^ hyperparameters.step;
    std::array<float, kWidened> wide;
    for (std::size_t at = begin; at < end; at += kWidened) {
      Piece piece = piece_of(span, at, std::min(end, at + kWidened));
      Bf16* const values = std::exchange(piece.parameter, {}).bf16();
      piece.master = wide.data();
      widen(piece.count, values, wide.data());
      body(piece);
      narrow_stochastically(piece.count, {storage_.seed, stream, span.first_index + at}, wide.data(), values);
    }
  });
}

void Elementwise::check(const Hyperparameters& hyperparameters, const Span& span) const {
  ensure(hyperparameters.step >= 1, "{} counts steps from 1 and was given step 0", name_);
  ensure(span.master != nullptr || (span.parameter.data != nullptr && span.parameter.type == Dtype::kBf16),
         "{} is given neither f32 values nor bf16 ones", name_);
  const std::vector<StateArray> state = this->state();
  ensure(span.state.size() == state.size(), "{} keeps {} arrays of state; the span has {}", name_,
         state.size(), span.state.size());
  for (std::size_t i = 0; i < state.size(); ++i)
    ensure(span.state[i].type == state[i].type, "{} keeps '{}' in {}; the span has {}", name_, state[i].name,
           name_of(state[i].type), name_of(span.state[i].type));
  kernels::require_float({span.gradient, span.parameter});
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
