#include "kernels/elementwise.h"

#include "kernels/harness.h"

namespace sluice::kernels::elementwise_test {
using namespace sluice::test;

class Elementwise : public testing::Test {
 protected:
  Threads threads_{2};
};

TEST_F(Elementwise, ConvertRoundsAsCoreDoes) {
  std::vector<float> values = random_values(70001, 1);
  for (std::uint32_t i = 0; i < 4096; ++i) values.push_back(std::bit_cast<float>(0x3f800000u + i * 0x1001u));
  for (const std::uint32_t bits :
       {0u, 0x80000000u, 1u, 0x7f800000u, 0xff800000u, 0x7f7fffffu, 0x7f800001u, 0xffc12345u, 0x7fffffffu,
        0x3f808000u, 0x3f818000u, 0x00008000u, 0x00018000u})
    values.push_back(std::bit_cast<float>(bits));
  for (std::uint32_t bits = 0; bits <= 0xffff;
       ++bits) {  // tries each value of f16, and what lies half-way to the next
    const float half = to_f32(F16{static_cast<std::uint16_t>(bits)});
    values.push_back(half);
    values.push_back(std::bit_cast<float>(std::bit_cast<std::uint32_t>(half) + 0x1000u));
    values.push_back(std::bit_cast<float>(std::bit_cast<std::uint32_t>(half) + 0x1001u));
    values.push_back(half * 1.5f);
  }
  for (const float value :
       {65519.99f, 65520.0f, 0x1p-25f, 0x1.000002p-25f, 0x1.8p-24f, 0x1.ffcp-15f, 0x1.ffep-15f})
    values.insert(values.end(), {value, -value});
  for (const std::int64_t target : targets())
    for (const Dtype type : {Dtype::kBf16, Dtype::kF16}) {
      const OnTarget scope(target);
      const TestArray from(Dtype::kF32, values);
      TestArray narrow(type, values.size()), wide(Dtype::kF32, values.size());
      convert(threads_, values.size(), from, narrow);
      EXPECT_EQ(narrow.bytes(), TestArray(type, values).bytes())
          << name_of(type) << " " << hwy::TargetName(target);
      convert(threads_, values.size(), narrow, wide);
      for (std::size_t i = 0; i < values.size(); ++i) {
        const auto expected = static_cast<float>(narrow[i]), got = static_cast<float>(wide[i]);
        ASSERT_EQ(std::bit_cast<std::uint32_t>(got), std::bit_cast<std::uint32_t>(expected)) << i;
      }
    }
}

TEST_F(Elementwise, ArithmeticOfEveryTypeAndSize) {
  for (const Dtype type : kFloatTypes)
    for (const Dtype other : kFloatTypes)
      for (const std::size_t n : kSizes) {
        const TestArray a(type, random_values(n, 1)), b(other, random_values(n, 2));
        TestArray sum(type, n), x(type, random_values(n, 3)), filled(other, n);
        const TestArray before = x;
        add(threads_, n, a, b, sum);
        scale(threads_, n, 1.7f, x);
        fill(threads_, n, -0.3f, filled);
        expect_close(
            sum, [&](auto i) { return a[i] + b[i]; }, tolerance(type), 0, "add");
        expect_close(
            x, [&](auto i) { return before[i] * double{1.7f}; }, tolerance(type), 0, "scale");
        expect_close(
            filled, [](auto) { return double{-0.3f}; }, tolerance(other), 0, "fill");
      }
}

TEST_F(Elementwise, InPlace) {
  TestArray x(Dtype::kF32, random_values(1003, 5));
  const TestArray before = x;
  add(threads_, x.size(), x, x, x);
  expect_close(
      x, [&](auto i) { return 2 * before[i]; }, 0, 0);
}

TEST_F(Elementwise, NarrowInPlacePacksIntoTheFirstHalf) {
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kF16})
    for (const std::size_t n : {std::size_t{0}, std::size_t{1}, std::size_t{1001}, kLoopGrain,
                                5 * kLoopGrain + 3, 9 * kLoopGrain + 1}) {
      const std::vector<float> values = random_values(n, 3);
      for (const std::int64_t target : targets()) {
        const OnTarget scope(target);
        TestArray packed(Dtype::kF32, values);
        narrow_in_place(threads_, n, packed.f32(), type);
        const auto expected = TestArray(type, values).bytes(), found = packed.bytes();
        EXPECT_TRUE(std::equal(expected.begin(), expected.end(), found.begin()))
            << n << " of " << name_of(type) << " on " << hwy::TargetName(target);
      }
    }
}

TEST_F(Elementwise, ConvertRowsKeepsToItsColumns) {
  constexpr std::size_t kRows = 7, kColumns = 19, kFromStride = 23, kToStride = 21;
  for (const Dtype type : kFloatTypes)
    for (const std::size_t from_stride : {std::size_t{0}, kFromStride}) {
      const TestArray from(type, random_values(kRows * kFromStride, 4));
      TestArray to(Dtype::kF32, std::vector<float>(kRows * kToStride, 5.0f));
      convert_rows(threads_, kRows, kColumns, from, from_stride, to, kToStride);
      const auto expected = [&](std::size_t i) {
        const std::size_t row = i / kToStride, column = i % kToStride;
        return column < kColumns ? from[row * from_stride + column] : 5.0;
      };
      expect_close(to, expected, 0, 0);
    }
}

TEST_F(Elementwise, OtherTypesAreRefused) {
  std::vector<float> memory(16);
  const Array array{memory.data(), Dtype::kI32};
  EXPECT_THROW(fill(threads_, 16, 0, array), Error);
  EXPECT_THROW(convert(threads_, 16, array, array), Error);
}

TEST(SameBits, Elementwise) {
  for (const Dtype type : kFloatTypes)
    expect_same_bits([type](Threads& threads) {
      const std::size_t n = 70001;
      const TestArray a(type, random_values(n, 1)), b(Dtype::kF32, random_values(n, 2));
      TestArray y(type, n);
      add(threads, n, a, b, y);
      scale(threads, n, 0.3f, y);
      return y.bytes();
    });
}

}  // namespace sluice::kernels::elementwise_test
