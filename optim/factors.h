#pragma once
#include <cstdint>
#include <limits>

// The constants of a step, for arithmetic-inl.h. An optimizer's constants are computed in f64 and rounded
// once. Private to this room.
namespace sluice::optim {

// Scaling and clipping of a gradient's elements, applied before anything else.
struct GradientRule {
  float factor = 1;
  float bound = std::numeric_limits<float>::infinity();
  constexpr bool clips() const { return bound != std::numeric_limits<float>::infinity(); }
};

struct AdamFactors {
  GradientRule gradient;
  float decay;                      // AdamW: 1 - lr * weight_decay; Adam: weight_decay
  float first_decay, first_rate;    // beta1, 1 - beta1
  float second_decay, second_rate;  // beta2, 1 - beta2
  float step_size;                  // lr / (1 - beta1^t)
  float root_scale;                 // 1 / sqrt(1 - beta2^t)
  float epsilon;
  bool decoupled;  // AdamW's decoupled weight decay
};

struct LionFactors {
  GradientRule gradient;
  float decay;              // 1 - lr * weight_decay
  float step_size;          // lr
  float of_average, blend;  // beta1, 1 - beta1: shares of average and gradient in the update's direction
  float keep, rate;         // beta2, 1 - beta2: their shares in the next average
};

struct SgdFactors {
  GradientRule gradient;
  float decay, learning_rate, momentum;
  bool nesterov;
};

// The random words for stochastic rounding of bf16 values without a master: CounterRandom(seed, stream) with
// kRoundingPhiloxRounds. An element uses half of a word; element 0 uses the lower half of word 0.
struct RoundingWords {
  std::uint64_t seed = 0, stream = 0, first_index = 0;  // first_index is that of the range's first element
};

}  // namespace sluice::optim
