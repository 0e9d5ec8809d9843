#pragma once
#include <array>
#include <functional>
#include <limits>

#include "core/dtype.h"
#include "core/threads.h"
#include "optim/optimizer.h"

// What the optimizers share where they go over elements, and how each is made. Private to this room.
namespace sluice::optim {

inline constexpr std::size_t kMostArrays = 3;

// The words that bf16 values without a master are rounded by: those of CounterRandom(seed, stream),
// of kRoundingPhiloxRounds. An element has half of one, element 0 the lower half of word 0.
struct RoundingWords {
  std::uint64_t seed = 0, stream = 0, first_index = 0;  // of the piece's first element
};

// What is done to a gradient's elements before anything else: see optim/gradient-inl.h.
struct GradientRule {
  float factor = 1;
  float bound = std::numeric_limits<float>::infinity();
};
GradientRule gradient_rule(const Hyperparameters& hyperparameters);

// A part of a span that one call of a kernel works on.
struct Piece {
  std::size_t first = 0, count = 0;  // elements of the span
  ConstArray gradient;
  float* master = nullptr;  // null: the parameter is rounded stochastically
  Array parameter;          // null data: none
  RoundingWords words;
  std::array<StatePart, kMostArrays> state;  // as many as the optimizer keeps

  Piece part(std::size_t at, std::size_t elements) const;  // REQUIRES: `at` is a multiple of kScaleBlock
};

// body(piece) for the whole span, on all threads: see optim/update-inl.h. Finds misuse by the engine: steps
// that do not begin at 1, state other than the optimizer describes, other types.
void for_each_piece(Threads& threads, const Optimizer& optimizer, const Hyperparameters& hyperparameters,
                    const Span& span, const std::function<void(const Piece&)>& body);
// Its two checks, for rounds, which go over elements in their own way.
void check_span(const Optimizer& optimizer, const Hyperparameters& hyperparameters, const Span& span);
void check_values(const Optimizer& optimizer, const Span& span);  // that it has some

// By squaring, and not std::pow, whose last bit differs between machines.
double power(double base, std::uint64_t exponent);

// An optimizer of these settings. Throws Error(kInvalidArgument) where they are not valid together.
using Maker = std::unique_ptr<Optimizer>(const Settings& settings, const Storage& storage);
// Loshchilov, Hutter 2019, algorithm 2, with torch.optim.AdamW's arithmetic: decay first (p *= 1 - lr * wd),
// then p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon). State "exp_avg", "exp_avg_sq".
Maker make_adamw;
// Kingma, Ba 2015, algorithm 1, as torch.optim.Adam: the same, but that the decay goes into the gradient
// (g += wd * p).
Maker make_adam;
// Chen et al. 2023, algorithm 2: p -= lr * (sign(beta1 m + (1 - beta1) g) + wd * p), then
// m = beta2 m + (1 - beta2) g. State "exp_avg".
Maker make_lion;
// As torch.optim.SGD with dampening 0 (Sutskever et al. 2013): g += wd * p; b = momentum * b + g;
// p -= lr * (nesterov ? g + momentum * b : b). State "momentum_buffer"; none where momentum is 0.
Maker make_sgd;
// Shazeer, Stern 2018, algorithms 4 and 5, with beta2 = 1 - t^-0.8, as transformers' Adafactor: of the last
// two dimensions of a parameter the second moment is kept by rows and columns, of a vector by elements. The
// weight decay goes into the parameter (p -= rate * wd * p, rate as scaled). State "exp_avg" with momentum;
// as a whole "exp_avg_sq_row", "exp_avg_sq_col", or "exp_avg_sq".
Maker make_adafactor;
// Jordan et al. 2024 as torch.optim.Muon, the iteration in f32, of parameters of two dimensions: m += (1 -
// momentum) (g - m); p *= 1 - lr * wd; p -= lr * scale * NewtonSchulz(nesterov ? m + (1 - momentum) (g - m) :
// m). All others, and those that are by elements, are AdamW's. State "momentum_buffer" of matrices, "exp_avg"
// and "exp_avg_sq" of the rest.
Maker make_muon;

}  // namespace sluice::optim
