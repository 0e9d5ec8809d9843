#pragma once
#include <algorithm>
#include <array>
#include <cstddef>

#include "core/dtype.h"

// Reads and writes elements of arrays of f32, bf16 or f16.
namespace sluice::test {

inline float value_at(ConstArray array, std::size_t i) {
  if (array.type == Dtype::kF32) return array.f32()[i];
  return array.type == Dtype::kBf16 ? to_f32(array.bf16()[i]) : to_f32(array.f16()[i]);
}

inline void set_value(Array array, std::size_t i, float value) {
  if (array.type == Dtype::kF32)
    array.f32()[i] = value;
  else if (array.type == Dtype::kBf16)
    array.bf16()[i] = to_bf16(value);
  else
    array.f16()[i] = to_f16(value);
}

// These functions go over millions of elements, which takes most of the time of tests that train. They are
// compiled for that, in a file of their own.

// Each of n numbers gets, or adds, of_value * the value + of_noise * a number + constant. The numbers are
// from 0 to 100, look like noise, and repeat after 101. Without values these count as 0.
struct Mix {
  float of_value, of_noise, constant = 0;
};
void mix_with_noise(std::size_t n, ConstArray values, const Mix& mix, std::size_t first, bool adds,
                    float* out);
void widen(std::size_t n, ConstArray values, float* wide);

}  // namespace sluice::test
