#include "kernels/elementwise.h"
#include "kernels/harness.h"

namespace sluice::kernels::activation_test {
using namespace sluice::test;

constexpr double kRoot = 0.79788456080286535588;  // sqrt(2 / pi)
double gelu(double x) { return 0.5 * x * (1 + std::tanh(kRoot * (x + 0.044715 * x * x * x))); }
double gelu_slope(double x) {
  const double t = std::tanh(kRoot * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * kRoot * (1 + 3 * 0.044715 * x * x);
}
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double silu(double x) { return x * sigmoid(x); }
double silu_slope(double x) { return sigmoid(x) * (1 + x * (1 - sigmoid(x))); }

// Values are dense near zero, and reach out to where the functions are saturated.
std::vector<float> arguments(std::size_t n) {
  std::vector<float> x = random_values(n, 7, 3);
  for (std::size_t i = 0; i < n; i += 5) x[i] = 40 * x[i];
  return x;
}

class Activation : public testing::Test {
 protected:
  Threads threads_{2};
};

TEST_F(Activation, Gelu) {
  for (const Dtype type : kFloatTypes)
    for (const std::size_t n : kSizes) {
      const TestArray x(type, arguments(n)), dy(type, random_values(n, 8));
      TestArray y(type, n), dx(type, n);
      gelu_forward(threads_, n, x, y);
      gelu_backward(threads_, n, x, dy, dx);
      expect_close(
          y, [&](auto i) { return gelu(x[i]); }, tolerance(type), 3e-7, "forward");
      expect_close(
          dx, [&](auto i) { return dy[i] * gelu_slope(x[i]); }, tolerance(type), 2e-6, "backward");
    }
}

TEST_F(Activation, Swiglu) {
  for (const Dtype type : kFloatTypes)
    for (const std::size_t n : kSizes) {
      const TestArray gate(type, arguments(n)), up(type, random_values(n, 8)), dy(type, random_values(n, 9));
      TestArray y(type, n), dgate(type, n), dup(type, n);
      swiglu_forward(threads_, n, gate, up, y);
      swiglu_backward(threads_, n, gate, up, dy, dgate, dup);
      expect_close(
          y, [&](auto i) { return silu(gate[i]) * up[i]; }, tolerance(type), 1e-6, "forward");
      expect_close(
          dgate, [&](auto i) { return dy[i] * up[i] * silu_slope(gate[i]); }, tolerance(type), 2e-6, "dgate");
      expect_close(
          dup, [&](auto i) { return dy[i] * silu(gate[i]); }, tolerance(type), 1e-6, "dup");
    }
}

TEST_F(Activation, SaturatesExactly) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<float> far = {-kInf, -3e38f, -1e10f, -200, -30, 30, 200, 1e10f, 3e38f, kInf};
  const std::size_t n = far.size();
  const TestArray x(Dtype::kF32, far), ones(Dtype::kF32, std::vector<float>(n, 1));
  TestArray y(Dtype::kF32, n), slope(Dtype::kF32, n), dup(Dtype::kF32, n);
  const auto limit = [&](std::size_t i) { return far[i] < 0 ? 0.0 : double{far[i]}; };
  const auto step = [&](std::size_t i) { return far[i] < 0 ? 0.0 : 1.0; };
  const auto check = [&](const TestArray& got, auto expected, std::size_t i) {
    EXPECT_EQ(got[i], expected(i)) << far[i];
  };
  gelu_forward(threads_, n, x, y);
  gelu_backward(threads_, n, x, ones, slope);
  for (std::size_t i = 0; i < n; ++i) check(y, limit, i), check(slope, step, i);
  swiglu_forward(threads_, n, x, ones, y);
  swiglu_backward(threads_, n, x, ones, ones, slope, dup);
  for (const std::size_t i : {0, 1, 2, 3, 6, 7, 8, 9})
    check(y, limit, i), check(slope, step, i), check(dup, limit, i);
}

TEST_F(Activation, NanStaysNan) {
  const TestArray x(Dtype::kF32, std::vector(1, std::numeric_limits<float>::quiet_NaN()));
  const TestArray one(Dtype::kF32, std::vector(1, 1.0f));
  TestArray y(Dtype::kF32, 1), dup(Dtype::kF32, 1);
  const auto expect_nan = [](const TestArray& array) { EXPECT_TRUE(std::isnan(array[0])); };
  gelu_forward(threads_, 1, x, y), expect_nan(y);
  gelu_backward(threads_, 1, x, one, y), expect_nan(y);
  swiglu_forward(threads_, 1, x, one, y), expect_nan(y);
  swiglu_backward(threads_, 1, x, one, one, y, dup), expect_nan(y), expect_nan(dup);
}

TEST(SameBits, Activation) {
  for (const Dtype type : kFloatTypes)
    expect_same_bits([type](Threads& threads) {
      const std::size_t n = 70001;
      const TestArray x(type, arguments(n)), up(type, random_values(n, 2)), dy(type, random_values(n, 3));
      TestArray a(type, n), b(type, n), c(type, n), d(type, n), e(type, n);
      gelu_forward(threads, n, x, a);
      gelu_backward(threads, n, x, dy, b);
      swiglu_forward(threads, n, x, up, c);
      swiglu_backward(threads, n, x, up, dy, d, e);
      return a.bytes() + b.bytes() + c.bytes() + d.bytes() + e.bytes();
    });
}

}  // namespace sluice::kernels::activation_test
