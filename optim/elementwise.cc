#include "optim/elementwise.h"

#include "core/error.h"
#include "kernels/simd.h"

namespace sluice::optim {

void for_each_piece(Threads& threads, const Span& span, const std::function<void(const Piece&)>& body) {
  threads.parallel_for(span.count, kernels::kLoopGrain, [&](std::size_t begin, std::size_t end) {
    Piece piece;
    piece.count = end - begin;
    piece.gradient = span.gradient.at(begin);
    piece.master = span.master + begin;
    if (span.parameter.data != nullptr) piece.parameter = span.parameter.at(begin);
    for (std::size_t i = 0; i < span.state.size(); ++i) piece.state[i] = span.state[i].at(begin);
    body(piece);
  });
}

void check_span(const Optimizer& optimizer, const Hyperparameters& hyperparameters, const Span& span) {
  ensure(hyperparameters.step >= 1, "{} counts steps from 1 and was given step 0", optimizer.name());
  const std::vector<StateArray> state = optimizer.state();
  ensure(span.state.size() == state.size(), "{} keeps {} arrays of state; the span has {}", optimizer.name(),
         state.size(), span.state.size());
  for (std::size_t i = 0; i < state.size(); ++i)
    ensure(span.state[i].type == state[i].type, "{} keeps '{}' in {}; the span has {}", optimizer.name(),
           state[i].name, name_of(state[i].type), name_of(span.state[i].type));
  kernels::require_float({span.gradient, span.parameter});
}

void check_share(std::string_view optimizer, std::string_view name, double value) {
  if (!(value >= 0 && value < 1))
    fail(ErrorCode::kInvalidArgument, "{}: {} is {}; it must be at least 0 and below 1", optimizer, name,
         value);
}

void check_state_type(std::string_view optimizer, Dtype type) {
  if (type != Dtype::kF32 && type != Dtype::kBf16)
    fail(ErrorCode::kInvalidArgument, "{}: its state is to be {}; it may be f32 or bf16", optimizer,
         name_of(type));
}

Json with_state_type(Json settings, Dtype type) {
  if (type != Dtype::kF32) settings["state"] = name_of(type);
  return settings;
}

double power(double base, std::uint64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent >>= 1, base *= base)
    if (exponent & 1) result *= base;
  return result;
}

}  // namespace sluice::optim
