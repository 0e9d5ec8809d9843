#pragma once
#include <algorithm>
#include <array>
#include <cstddef>

#include "core/dtype.h"

// Reads and writes single elements of arrays of f32, bf16 or f16.
namespace sluice::test {

inline float value_at(ConstArray array, std::size_t i) {
  if (array.type == Dtype::kF32) return array.f32()[i];
  return array.type == Dtype::kBf16 ? to_f32(array.bf16()[i]) : to_f32(array.f16()[i]);
}

// Calls loop(value) once, whose argument gives the element of an index, as value_at() does. So a loop over
// many elements asks for the type once.
template <class Loop>
void with_values(ConstArray array, const Loop& loop) {
  if (array.type == Dtype::kF32)
    loop([values = array.f32()](std::size_t i) { return values[i]; });
  else if (array.type == Dtype::kBf16)
    loop([values = array.bf16()](std::size_t i) { return to_f32(values[i]); });
  else
    loop([values = array.f16()](std::size_t i) { return to_f32(values[i]); });
}

inline void set_value(Array array, std::size_t i, float value) {
  if (array.type == Dtype::kF32)
    array.f32()[i] = value;
  else if (array.type == Dtype::kBf16)
    array.bf16()[i] = to_bf16(value);
  else
    array.f16()[i] = to_f16(value);
}

// Calls use(i, number) for each i below n with numbers from 0 to 100 that look like noise and repeat after
// 101: dividing for each of millions of elements would take most of the time of a test that trains.
template <class Use>
void for_each_with_noise(std::size_t n, std::size_t first, const Use& use) {
  constexpr std::size_t kPeriod = 101;
  std::array<float, kPeriod> numbers;
  for (std::size_t j = 0; j < kPeriod; ++j) numbers[j] = static_cast<float>((first + 31 * j) % kPeriod);
  for (std::size_t begin = 0; begin < n; begin += kPeriod)
    for (std::size_t j = 0; j < std::min(kPeriod, n - begin); ++j) use(begin + j, numbers[j]);
}

}  // namespace sluice::test
