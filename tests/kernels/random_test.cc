#include "core/random.h"

#include "kernels/elementwise.h"
#include "kernels/harness.h"

namespace sluice::kernels::random_test {
using namespace sluice::test;

constexpr std::uint64_t kSeed = 0x123456789abcdefu, kStream = 0xfedcba987654321u;
constexpr std::uint64_t kFar = (std::uint64_t{1} << 34) - 77;  // blocks on both sides of 2^32

std::uint32_t word(std::uint64_t index) { return CounterRandom(kSeed, kStream).block(index / 4)[index % 4]; }

double normal(std::uint64_t index) {
  const std::uint64_t pair = index / 2 * 2;
  const double u = ((word(pair) >> 8) + 1) * 0x1.0p-24, v = (word(pair + 1) >> 8) * 0x1.0p-24;
  const double radius = std::sqrt(-2 * std::log(u)), angle = 2 * 3.14159265358979323846 * v;
  return radius * (index % 2 == 0 ? std::cos(angle) : std::sin(angle));
}

class Random : public testing::Test {
 protected:
  Threads threads_{2};
};

TEST_F(Random, DropoutKeepsByTheWordOfTheElement) {
  for (const Dtype type : kFloatTypes)
    for (const std::size_t n : kSizes) {
      const float p = 0.3f;
      const TestArray x(type, random_values(n, 1)), residual(type, random_values(n, 2));
      TestArray y(type, n), alone(type, n), dx(type, n);
      dropout_add(threads_, n, x, residual, p, kSeed, kStream, kFar, y);
      dropout_add(threads_, n, x, ConstArray{}, p, kSeed, kStream, kFar, alone);
      dropout_backward(threads_, n, x, p, kSeed, kStream, kFar, dx);
      const auto dropped = [&](std::size_t i) {
        return to_unit_interval(word(kFar + i)) < 1.0f - p ? x[i] / (1.0 - double{p}) : 0.0;
      };
      expect_close(
          y, [&](auto i) { return residual[i] + dropped(i); }, tolerance(type), 1e-6, "with a residual");
      expect_close(alone, dropped, tolerance(type), 0, "alone");
      EXPECT_EQ(alone.bytes(), dx.bytes());
    }
}

TEST_F(Random, WithoutDropoutOnlyTheResidualIsAdded) {
  const TestArray x(Dtype::kF32, random_values(1000, 1)), residual(Dtype::kF32, random_values(1000, 2));
  TestArray y(Dtype::kF32, 1000), alone(Dtype::kF32, 1000);
  dropout_add(threads_, 1000, x, residual, 0, kSeed, kStream, 0, y);
  dropout_add(threads_, 1000, x, ConstArray{}, 0, kSeed, kStream, 0, alone);
  expect_close(
      y, [&](auto i) { return residual[i] + x[i]; }, 1e-7, 0);
  EXPECT_EQ(alone.bytes(), x.bytes());
}

TEST_F(Random, NormalValuesAreThoseOfTheDocumentedWords) {
  for (const Dtype type : kFloatTypes)
    for (const std::size_t n : kSizes) {
      TestArray values(type, n);
      fill_normal(threads_, n, kSeed, kStream, kFar, 0.25f, 2.0f, values);
      expect_close(
          values, [](auto i) { return 0.25 + 2.0 * normal(kFar + i); }, tolerance(type), 3e-6);
    }
}

TEST_F(Random, NormalValuesHaveTheMomentsOfTheDistribution) {
  const std::size_t n = 200000;
  TestArray values(Dtype::kF32, n);
  fill_normal(threads_, n, 1, 2, 0, 0, 1, values);
  double mean = 0, square = 0, fourth = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const double v = values[i];
    mean += v / n, square += v * v / n, fourth += v * v * v * v / n;
  }
  EXPECT_NEAR(mean, 0, 0.012);
  EXPECT_NEAR(square, 1, 0.016);
  EXPECT_NEAR(fourth, 3, 0.12);
}

TEST_F(Random, ElementsDoNotDependOnWhereACallBegins) {
  TestArray whole(Dtype::kF32, 5000);
  fill_normal(threads_, 5000, kSeed, kStream, 0, 0, 1, whole);
  for (const std::size_t first : {1, 3, 255, 256, 1021}) {
    TestArray part(Dtype::kF32, 1500);
    fill_normal(threads_, 1500, kSeed, kStream, first, 0, 1, part);
    expect_close(
        part, [&](auto i) { return whole[first + i]; }, 0, 0);
  }
}

TEST(SameBits, Random) {
  for (const Dtype type : kFloatTypes)
    expect_same_bits([type](Threads& threads) {
      const std::size_t n = 70001;
      const TestArray x(type, random_values(n, 1)), residual(Dtype::kF32, random_values(n, 2));
      TestArray y(type, n), normals(type, n);
      dropout_add(threads, n, x, residual, 0.1f, kSeed, kStream, kFar, y);
      fill_normal(threads, n, kSeed, kStream, kFar, 0, 0.02f, normals);
      return y.bytes() + normals.bytes();
    });
}

}  // namespace sluice::kernels::random_test
