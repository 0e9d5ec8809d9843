#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace sluice {

enum class Dtype : std::uint8_t { kF32, kBf16, kF16, kI32, kU16, kU8 };

std::size_t size_of(Dtype type);                        // bytes of one element
std::string_view name_of(Dtype type);                   // "f32", "bf16", ...
std::optional<Dtype> dtype_from_name(std::string_view name);

// bfloat16: the upper half of an f32. Rounds to nearest, ties to even; NaN stays NaN.
struct Bf16 {
  std::uint16_t bits;
};

inline float to_f32(Bf16 value) { return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16); }

inline Bf16 to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return Bf16{static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  return Bf16{static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// A typed pointer, for functions that take arrays of several types.
struct ConstArray {
  const void* data = nullptr;
  Dtype type = Dtype::kF32;
  const float* f32() const { return static_cast<const float*>(data); }
  const Bf16* bf16() const { return static_cast<const Bf16*>(data); }
  ConstArray at(std::size_t element) const {
    return {static_cast<const std::byte*>(data) + element * size_of(type), type};
  }
};

struct Array {
  void* data = nullptr;
  Dtype type = Dtype::kF32;
  float* f32() const { return static_cast<float*>(data); }
  Bf16* bf16() const { return static_cast<Bf16*>(data); }
  Array at(std::size_t element) const { return {static_cast<std::byte*>(data) + element * size_of(type), type}; }
  operator ConstArray() const { return {data, type}; }  // NOLINT: an Array is a ConstArray
};

}  // namespace sluice
