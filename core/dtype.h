#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace sluice {

enum class Dtype : std::uint8_t { kF32, kBf16, kF16, kI32, kU16, kU8 };

std::size_t size_of(Dtype type);       // bytes of one element
std::string_view name_of(Dtype type);  // "f32", "bf16", ...
std::optional<Dtype> dtype_from_name(std::string_view name);
constexpr bool is_float(Dtype type) {
  return type == Dtype::kF32 || type == Dtype::kBf16 || type == Dtype::kF16;
}

// The constexpr functions here and in random.h also run on GPUs.

// bfloat16, the upper half of an f32. Conversion rounds to nearest, ties to even; NaN stays NaN.
struct Bf16 {
  std::uint16_t bits;
};

constexpr float to_f32(Bf16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

constexpr Bf16 to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return Bf16{static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  return Bf16{static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

// IEEE 754 binary16: 5 bits of exponent, 10 of fraction. Conversion rounds to nearest, ties to even, also to
// subnormal values (below 2^-14). Values from 65520 on become infinite; NaN stays NaN, and becomes quiet.
struct F16 {
  std::uint16_t bits;
};

constexpr float to_f32(F16 value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu, shifted = magnitude << 13;
  if (magnitude < 0x0400u)  // subnormal: a multiple of 2^-24
    return std::bit_cast<float>(sign |
                                std::bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 0x1p-24f));
  if (magnitude < 0x7c00u) return std::bit_cast<float>(sign | (shifted + (112u << 23)));
  return std::bit_cast<float>(sign | 0x7f800000u | shifted | (magnitude > 0x7c00u ? 0x400000u : 0u));
}

constexpr F16 to_f16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  const auto with_sign = [sign](std::uint32_t rest) { return F16{static_cast<std::uint16_t>(sign | rest)}; };
  if (magnitude > 0x7f800000u) return with_sign(0x7e00u | (magnitude >> 13 & 0x3ffu));
  if (magnitude >= 0x477ff000u) return with_sign(0x7c00u);
  if (magnitude >= 0x38800000u)
    return with_sign((magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
  // From 0.5 to 1 the values of f32 are 2^-24 apart, so adding 0.5 rounds to a multiple of 2^-24.
  const float sum = std::bit_cast<float>(magnitude) + 0.5f;
  return with_sign(std::bit_cast<std::uint32_t>(sum) - std::bit_cast<std::uint32_t>(0.5f));
}

// A typed pointer, for functions that take arrays of several types.
struct ConstArray {
  const void* data = nullptr;
  Dtype type = Dtype::kF32;
  const float* f32() const { return static_cast<const float*>(data); }
  const Bf16* bf16() const { return static_cast<const Bf16*>(data); }
  const F16* f16() const { return static_cast<const F16*>(data); }
  ConstArray at(std::size_t element) const {
    return {static_cast<const std::byte*>(data) + element * size_of(type), type};
  }
};

struct Array {
  void* data = nullptr;
  Dtype type = Dtype::kF32;
  float* f32() const { return static_cast<float*>(data); }
  Bf16* bf16() const { return static_cast<Bf16*>(data); }
  F16* f16() const { return static_cast<F16*>(data); }
  Array at(std::size_t element) const {
    return {static_cast<std::byte*>(data) + element * size_of(type), type};
  }
  operator ConstArray() const { return {data, type}; }  // NOLINT: an Array is a ConstArray
};

}  // namespace sluice
