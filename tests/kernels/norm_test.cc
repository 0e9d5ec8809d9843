#include "kernels/norm.h"

#include "kernels/harness.h"

namespace sluice::kernels::norm_test {
using namespace sluice::test;

constexpr double kEpsilon = 1e-5;

// The arrays of one case of a norm, and their reference in f64.
struct Case {
  bool centred;
  Dtype type;
  std::size_t rows, width;
  TestArray x, gamma, beta, dy, y, dx;
  std::vector<float> statistics, dgamma, dbeta, workspace;
  std::vector<double> mean, inverse, level, slope;  // one value a row

  Case(bool is_centred, Dtype of_type, std::size_t row_count, std::size_t row_width)
      : centred(is_centred),
        type(of_type),
        rows(row_count),
        width(row_width),
        x(type, shifted(random_values(rows * width, 1))),
        gamma(type, random_values(width, 2)),
        beta(type, random_values(width, 3)),
        dy(type, random_values(rows * width, 4)),
        y(type, rows * width),
        dx(type, rows * width),
        statistics(rows * (centred ? 2 : 1)),
        dgamma(width, 0.5f),
        dbeta(width, 0.5f),
        workspace(norm_backward_workspace(rows, width) / sizeof(float)),
        mean(rows),
        inverse(rows),
        level(rows),
        slope(rows) {
    for (std::size_t row = 0; row < rows; ++row) {
      for (std::size_t i = 0; centred && i < width; ++i) mean[row] += x[row * width + i] / width;
      double variance = 0;
      for (std::size_t i = 0; i < width; ++i) variance += std::pow(x[row * width + i] - mean[row], 2) / width;
      inverse[row] = 1 / std::sqrt(variance + kEpsilon);
      for (std::size_t i = 0; i < width; ++i) {
        const double inner = dy[row * width + i] * gamma[i] / width;
        if (centred) level[row] += inner;
        slope[row] += inner * normal(row * width + i);
      }
    }
  }

  static std::vector<float> shifted(std::vector<float> values) {
    for (float& value : values) value += 3;
    return values;
  }

  void run(Threads& threads, bool accumulate) {
    const auto epsilon = static_cast<float>(kEpsilon);
    if (centred) {
      layernorm_forward(threads, rows, width, x, gamma, beta, epsilon, y, statistics.data());
      layernorm_backward(threads, rows, width, x, gamma, statistics.data(), dy, dx, dgamma.data(),
                         dbeta.data(), accumulate, workspace.data());
    } else {
      rmsnorm_forward(threads, rows, width, x, gamma, epsilon, y, statistics.data());
      rmsnorm_backward(threads, rows, width, x, gamma, statistics.data(), dy, dx, dgamma.data(), accumulate,
                       workspace.data());
    }
  }

  double normal(std::size_t i) const { return (x[i] - mean[i / width]) * inverse[i / width]; }
  double output(std::size_t i) const {
    return normal(i) * gamma[i % width] + (centred ? beta[i % width] : 0);
  }
  double input_gradient(std::size_t i) const {
    return inverse[i / width] * (dy[i] * gamma[i % width] - level[i / width] - normal(i) * slope[i / width]);
  }
  double gamma_gradient(std::size_t column) const {
    double sum = 0;
    for (std::size_t i = column; i < rows * width; i += width) sum += dy[i] * normal(i);
    return sum;
  }
  double beta_gradient(std::size_t column) const {
    double sum = 0;
    for (std::size_t i = column; i < rows * width; i += width) sum += dy[i];
    return sum;
  }
};

void check(Threads& threads, Case& c, bool accumulate) {
  c.run(threads, accumulate);
  const double relative = tolerance(c.type), before = accumulate ? 0.5 : 0;
  const double large = 1 + *std::max_element(c.inverse.begin(), c.inverse.end());
  expect_close(
      c.y, [&](auto i) { return c.output(i); }, relative, 4e-6 * large, "y");
  expect_close(
      c.dx, [&](auto i) { return c.input_gradient(i); }, relative, 1e-5 * large, "dx");
  expect_close(
      TestArray(Dtype::kF32, c.dgamma), [&](auto i) { return before + c.gamma_gradient(i); }, 2e-6,
      1e-4 * large, "dgamma");
  if (!c.centred) return;
  expect_close(
      TestArray(Dtype::kF32, c.dbeta), [&](auto i) { return before + c.beta_gradient(i); }, 2e-6, 2e-5,
      "dbeta");
}

class Norm : public testing::TestWithParam<bool> {};

TEST_P(Norm, AgreesWithTheReference) {
  Threads threads(2);
  for (const Dtype type : kFloatTypes)
    for (const std::size_t rows : {1, 5, 130})
      for (const std::size_t width : {5, 15, 16, 100, 768}) {
        SCOPED_TRACE(testing::Message() << name_of(type) << " " << rows << " x " << width);
        Case c(GetParam(), type, rows, width);
        check(threads, c, false);
        check(threads, c, false);
        Case added(GetParam(), type, rows, width);
        check(threads, added, true);
      }
}

TEST_P(Norm, RowsOfSeveralBlocks) {
  Threads threads(2);
  Case c(GetParam(), Dtype::kF32, 3, 9001);
  check(threads, c, false);
}

TEST_P(Norm, KeepsItsStatistics) {
  Threads threads(2);
  Case c(GetParam(), Dtype::kF32, 9, 300);
  c.run(threads, false);
  for (std::size_t row = 0; row < c.rows; ++row) {
    if (c.centred) {
      EXPECT_NEAR(c.statistics[2 * row], c.mean[row], 1e-5);
    }
    EXPECT_NEAR(c.statistics[c.centred ? 2 * row + 1 : row], c.inverse[row], 1e-5);
  }
}

TEST_P(Norm, SameBits) {
  for (const Dtype type : kFloatTypes)
    expect_same_bits([&](Threads& threads) {
      Case c(GetParam(), type, 200, 333);
      c.run(threads, true);
      return c.y.bytes() + c.dx.bytes() + TestArray(Dtype::kF32, c.dgamma).bytes() +
             TestArray(Dtype::kF32, c.dbeta).bytes() + TestArray(Dtype::kF32, c.statistics).bytes();
    });
}

INSTANTIATE_TEST_SUITE_P(Kinds, Norm, testing::Bool(),
                         [](const auto& test) { return test.param ? "LayerNorm" : "RmsNorm"; });

}  // namespace sluice::kernels::norm_test
