#pragma once
#include <array>
#include <functional>
#include <string_view>

#include "core/dtype.h"
#include "core/threads.h"
#include "optim/optimizer.h"

// What the elementwise optimizers share. Private to this room.
namespace sluice::optim {

// A part of a span that one call of a kernel works on.
struct Piece {
  std::size_t count = 0;
  ConstArray gradient;
  float* master = nullptr;
  Array parameter;             // null data: none
  std::array<Array, 2> state;  // as many as the optimizer keeps
};

// body(piece) for the whole span, on all threads.
void for_each_piece(Threads& threads, const Span& span, const std::function<void(const Piece&)>& body);

// Misuse by the engine: steps that do not begin at 1, state other than the optimizer describes, other types.
void check_span(const Optimizer& optimizer, const Hyperparameters& hyperparameters, const Span& span);

// Throws Error(kInvalidArgument) unless it is at least 0 and below 1.
void check_share(std::string_view optimizer, std::string_view name, double value);

// Throws Error(kInvalidArgument) unless arrays of state can have the type.
void check_state_type(std::string_view optimizer, Dtype type);

// The settings with the state's type, where it is not f32.
Json with_state_type(Json settings, Dtype type);

// By squaring, and not std::pow, whose last bit differs between machines.
double power(double base, std::uint64_t exponent);

}  // namespace sluice::optim
