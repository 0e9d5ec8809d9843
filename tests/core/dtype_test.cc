#include "core/dtype.h"
#include "testing.h"

namespace sluice::dtype_test {

TEST(Dtype, NamesAndSizes) {
  EXPECT_EQ(size_of(Dtype::kF32), 4u);
  EXPECT_EQ(size_of(Dtype::kBf16), 2u);
  EXPECT_EQ(size_of(Dtype::kF16), 2u);
  EXPECT_EQ(size_of(Dtype::kI32), 4u);
  EXPECT_EQ(size_of(Dtype::kU16), 2u);
  EXPECT_EQ(size_of(Dtype::kU8), 1u);
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kF16, Dtype::kI32, Dtype::kU16, Dtype::kU8})
    EXPECT_EQ(dtype_from_name(name_of(type)), type);
  EXPECT_EQ(name_of(Dtype::kBf16), "bf16");
  for (const char* name : {"", "F32", "f64", "f32 "}) EXPECT_FALSE(dtype_from_name(name).has_value()) << name;
}

TEST(Dtype, ArraysStepByElements) {
  std::uint16_t values[4] = {};
  EXPECT_EQ((Array{values, Dtype::kBf16}.at(3).data), values + 3);
  EXPECT_EQ((ConstArray{values, Dtype::kF32}.at(1).data), values + 2);
  const ConstArray constant = Array{values, Dtype::kU16};
  EXPECT_EQ(constant.data, values);
  EXPECT_EQ(constant.type, Dtype::kU16);
}

TEST(Bf16, EveryValueComesBack) {
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float wide = to_f32(Bf16{static_cast<std::uint16_t>(bits)});
    const std::uint16_t back = to_bf16(wide).bits;
    if (std::isnan(wide)) {
      ASSERT_TRUE(std::isnan(to_f32(Bf16{back}))) << bits;
      ASSERT_EQ(back & 0x8000u, bits & 0x8000u) << bits;
    } else {
      ASSERT_EQ(back, bits);
    }
  }
}

// Whether the f32 of these bits becomes the nearest value; a NaN becomes one of its sign.
template <typename Half>
bool rounds(std::uint32_t bits, Half half_of(float), std::uint16_t nearest_to(float)) {
  const auto value = std::bit_cast<float>(bits);
  const Half half = half_of(value);
  if (!std::isnan(value)) return half.bits == nearest_to(value);
  return std::isnan(to_f32(half)) && half.bits >> 15 == bits >> 31;
}

// Finds the nearest bfloat16 by distance in doubles; ties go to the even one, and infinity stands at 2^128.
std::uint16_t nearest_bf16(float value) {
  const auto below = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  if (std::isinf(value)) return below;
  const auto above = static_cast<std::uint16_t>(below + 1);
  const auto magnitude = [](std::uint16_t bits) {
    const double wide = std::fabs(static_cast<double>(to_f32(Bf16{bits})));
    return std::isinf(wide) ? 0x1p128 : wide;
  };
  const double to_below = std::fabs(static_cast<double>(value)) - magnitude(below);
  const double to_above = magnitude(above) - std::fabs(static_cast<double>(value));
  if (to_below == to_above) return below % 2 == 0 ? below : above;
  return to_below < to_above ? below : above;
}

// Tries all upper halves with the lower halves at which rounding could change, and others spread over the
// rest.
TEST(Bf16, RoundsToNearestTiesToEven) {
  for (std::uint32_t upper = 0; upper <= 0xffff; ++upper)
    for (const std::uint32_t lower :
         {0x0000u, 0x0001u, 0x1234u, 0x7fffu, 0x8000u, 0x8001u, 0xabcdu, 0xfffeu, 0xffffu})
      ASSERT_TRUE(rounds<Bf16>(upper << 16 | lower, to_bf16, nearest_bf16))
          << std::hex << upper << " " << lower;
}

TEST(Bf16, EveryLowerHalf) {
  for (const std::uint32_t upper :
       {0x0000u, 0x3f80u, 0x3f81u, 0x7f7fu, 0x8000u, 0xc049u, 0xff7fu, 0x7f80u, 0xff80u})
    for (std::uint32_t lower = 0; lower <= 0xffff; ++lower)
      ASSERT_TRUE(rounds<Bf16>(upper << 16 | lower, to_bf16, nearest_bf16))
          << std::hex << upper << " " << lower;
}

TEST(F16, EveryValueComesBack) {
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float wide = to_f32(F16{static_cast<std::uint16_t>(bits)});
    const std::uint32_t fraction = bits & 0x3ffu, exponent = bits >> 10 & 0x1fu;
    const std::uint16_t back = to_f16(wide).bits;
    ASSERT_EQ(std::signbit(wide), bits >= 0x8000u) << bits;
    if (exponent == 31 && fraction != 0) {
      ASSERT_TRUE(std::isnan(wide)) << bits;
      ASSERT_EQ(back, bits | 0x200u) << bits;  // quiet
      continue;
    }
    ASSERT_EQ(back, bits);
    const double unit = std::ldexp(1.0, static_cast<int>(exponent == 0 ? 1 : exponent) - 25);
    const double expected = exponent == 31 ? std::numeric_limits<double>::infinity()
                                           : unit * (fraction + (exponent == 0 ? 0 : 0x400));
    ASSERT_EQ(std::fabs(static_cast<double>(wide)), expected) << bits;
  }
}

// Finds the nearest f16 by distance in doubles; ties go to the even one, and infinity stands at 2^16.
std::uint16_t nearest_f16(float value) {
  const double magnitude = std::fabs(static_cast<double>(value));
  const auto distance = [&](std::uint32_t bits) {
    return std::fabs(magnitude - (bits == 0x7c00u ? 0x1p16 : to_f32(F16{static_cast<std::uint16_t>(bits)})));
  };
  std::uint32_t low = 0, high = 0x7c00u;  // bisection keeps low <= magnitude, where that is below 2^16
  if (magnitude >= 0x1p16) low = high;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    (to_f32(F16{static_cast<std::uint16_t>(middle)}) <= magnitude ? low : high) = middle;
  }
  const bool up = distance(high) < distance(low) || (distance(high) == distance(low) && low % 2 == 1);
  return static_cast<std::uint16_t>((up ? high : low) | (std::signbit(value) ? 0x8000u : 0u));
}

TEST(F16, RoundsToNearestTiesToEven) {
  for (std::uint32_t upper = 0; upper <= 0xffff; ++upper)
    for (const std::uint32_t lower : {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x3000u, 0x7fffu, 0x8000u,
                                      0x8001u, 0x9000u, 0xb000u, 0xefffu, 0xf000u, 0xf001u, 0xffffu})
      ASSERT_TRUE(rounds<F16>(upper << 16 | lower, to_f16, nearest_f16)) << std::hex << upper << " " << lower;
}

}  // namespace sluice::dtype_test
