#pragma once
#include <array>
#include <functional>
#include <variant>

#include "core/dtype.h"
#include "core/threads.h"
#include "optim/factors.h"
#include "optim/optimizer.h"

// Code that elementwise updates share, and the factory functions of all optimizers. Private to this room.
namespace sluice::optim {

inline constexpr std::size_t kMostArrays = 3;

// An elementwise update, with the constants of a step.
struct ElementwiseUpdate {
  const char* name;  // of its kernels: "adam", "sgd_stateless"
  std::variant<AdamFactors, LionFactors, SgdFactors> factors;
};

GradientRule gradient_rule(const Hyperparameters& hyperparameters);

// A part of a span that one call of a kernel updates.
struct SpanRange {
  std::size_t first = 0, count = 0;  // in elements of the span
  ConstArray gradient;
  float* master = nullptr;  // null where the parameter is rounded stochastically
  Array parameter;          // its data is null where the master alone is the parameter
  RoundingWords words;
  std::array<StatePart, kMostArrays> state;  // the optimizer's arrays come first, the others are empty

  SpanRange part(std::size_t at, std::size_t elements) const;  // REQUIRES: `at` is a multiple of kScaleBlock
};

// Calls body(range) for ranges that cover the span, on all threads: see optim/update-inl.h. Throws
// Error(kInternal) where the engine misuses it: with a step of 0, or with state arrays or types that the
// optimizer does not describe.
void for_each_range(Threads& threads, const Optimizer& optimizer, const Hyperparameters& hyperparameters,
                    const Span& span, const std::function<void(const SpanRange&)>& body);
// The checks of for_each_range(), for optimizers with rounds, which loop over elements in their own way.
void check_span(const Optimizer& optimizer, const Hyperparameters& hyperparameters, const Span& span);
void check_values(const Optimizer& optimizer, const Span& span);  // REQUIRES: a master, or bf16 values

RoundingWords rounding_words(const Optimizer& optimizer, const Hyperparameters& hyperparameters,
                             const Span& span);

inline float rounded(double value) { return static_cast<float>(value); }
// Multiplies repeatedly, because the last bit of std::pow differs between machines.
double power(double base, std::uint64_t exponent);

// Makes an optimizer with these settings. Throws Error(kInvalidArgument) for an invalid combination.
using Maker = std::unique_ptr<Optimizer>(const Settings& settings, const Storage& storage);
// Loshchilov, Hutter 2019, algorithm 2, with torch.optim.AdamW's arithmetic: decay first (p *= 1 - lr * wd),
// then p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + epsilon). State "exp_avg", "exp_avg_sq".
Maker make_adamw;
// Kingma, Ba 2015, algorithm 1, as torch.optim.Adam: like AdamW, except that the decay goes into the gradient
// (g += wd * p).
Maker make_adam;
// Chen et al. 2023, algorithm 2: p -= lr * (sign(beta1 m + (1 - beta1) g) + wd * p), then
// m = beta2 m + (1 - beta2) g. State "exp_avg".
Maker make_lion;
// As torch.optim.SGD with dampening 0 (Sutskever et al. 2013): g += wd * p; b = momentum * b + g;
// p -= lr * (nesterov ? g + momentum * b : b). State "momentum_buffer"; none where momentum is 0.
Maker make_sgd;
// Shazeer, Stern 2018, algorithms 4 and 5, with beta2 = 1 - t^-0.8, as transformers' Adafactor. The second
// moment is factored into rows and columns of a parameter's last two dimensions; a vector has it for each
// element. The weight decay goes into the parameter (p -= rate * wd * p, with the scaled rate). State
// "exp_avg" with momentum; state of the whole parameter "exp_avg_sq_row" and "exp_avg_sq_col", or
// "exp_avg_sq".
Maker make_adafactor;
// Jordan et al. 2024 as torch.optim.Muon, with the Newton-Schulz iteration in f32, for parameters of two
// dimensions: m += (1 - momentum) (g - m); p *= 1 - lr * wd; p -= lr * scale * NewtonSchulz(nesterov ? m + (1
// - momentum) (g - m) : m). AdamW updates all other parameters, and those declared `by_elements`. State
// "momentum_buffer" of matrices, "exp_avg" and "exp_avg_sq" of the rest.
Maker make_muon;

}  // namespace sluice::optim
