#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

// bf16 values that are updated in f32, without a master. Private to this room.
namespace sluice::optim {

// The words of rounding: those of CounterRandom(seed, stream), one an element.
struct RoundingWords {
  std::uint64_t seed = 0, stream = 0, first_index = 0;
};

void widen(std::size_t n, const Bf16* from, float* to);

// Rounds each value to one of the two bf16 values around it, to the upper one with the probability of its
// distance from the lower: the lower 16 bits of its word are added to the value's, which are then cut off.
// NaN stays NaN.
void narrow_stochastically(std::size_t n, const RoundingWords& words, const float* from, Bf16* to);

}  // namespace sluice::optim
