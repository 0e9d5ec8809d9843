#pragma once
#include <cstddef>

#include "core/dtype.h"

// Reads and writes single elements of arrays of f32, bf16 or f16.
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

}  // namespace sluice::test
