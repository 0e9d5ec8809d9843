#include "kernels/rope.h"

#include "kernels/harness.h"

namespace sluice::kernels::rope_test {
using namespace sluice::test;

std::vector<double> frequencies(std::size_t half) {
  std::vector<double> result(half);
  for (std::size_t i = 0; i < half; ++i) result[i] = std::pow(10000.0, -static_cast<double>(i) / half);
  return result;
}

class Rope : public testing::Test {
 protected:
  Threads threads_{2};
};

TEST_F(Rope, TurnsPairsOfHalvesByTheirPosition) {
  const std::size_t length = 7, rows = 3 * length, heads = 3, gap = 5;
  for (const Dtype type : kFloatTypes)
    for (const std::size_t width : {2, 6, 64, 600})
      for (const std::size_t first : {std::size_t{0}, std::size_t{1000}, std::size_t{131000}})
        for (const bool inverse : {false, true}) {
          SCOPED_TRACE(testing::Message() << name_of(type) << " width " << width << " from " << first);
          const std::size_t half = width / 2, stride = heads * width + gap;
          const auto turns = frequencies(half);
          const TestArray before(type, random_values(rows * stride, 1));
          TestArray x = before;
          rope(threads_, rows, length, first, heads, width, stride, turns, inverse, x);
          const auto expected = [&](std::size_t i) {
            const std::size_t in_row = i % stride, in_head = in_row % width, pair = in_head % half;
            if (in_row >= heads * width) return before[i];
            const double angle = (first + i / stride % length) * turns[pair] * (inverse ? -1 : 1);
            return in_head < half ? before[i] * std::cos(angle) - before[i + half] * std::sin(angle)
                                  : before[i] * std::cos(angle) + before[i - half] * std::sin(angle);
          };
          expect_close(x, expected, tolerance(type), 5e-7);
        }
}

TEST_F(Rope, PositionZeroChangesNothing) {
  const TestArray before(Dtype::kF32, random_values(4 * 64, 1));
  TestArray x = before;
  rope(threads_, 4, 1, 0, 1, 64, 64, frequencies(32), false, x);
  EXPECT_EQ(x.bytes(), before.bytes());
}

TEST_F(Rope, FrequenciesMustMatchTheHead) {
  TestArray x(Dtype::kF32, 64);
  EXPECT_THROW(rope(threads_, 1, 1, 0, 1, 64, 64, frequencies(16), false, x), Error);
}

TEST(SameBits, Rope) {
  for (const Dtype type : kFloatTypes)
    expect_same_bits([type](Threads& threads) {
      const std::size_t length = 100, rows = 2 * length, heads = 5, width = 38;
      TestArray x(type, random_values(rows * heads * width, 1));
      rope(threads, rows, length, 12345, heads, width, heads * width, frequencies(width / 2), false, x);
      return x.bytes();
    });
}

}  // namespace sluice::kernels::rope_test
