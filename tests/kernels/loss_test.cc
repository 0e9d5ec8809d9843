#include "kernels/loss.h"

#include "kernels/harness.h"

namespace sluice::kernels::loss_test {
using namespace sluice::test;

struct Row {
  double largest = -std::numeric_limits<double>::infinity(), sum = 0;
  Row(const TestArray& logits, std::size_t row, std::size_t classes) {
    for (std::size_t i = 0; i < classes; ++i) largest = std::max(largest, logits[row * classes + i]);
    for (std::size_t i = 0; i < classes; ++i) sum += std::exp(logits[row * classes + i] - largest);
  }
};

class CrossEntropy : public testing::Test {
 protected:
  Threads threads_{2};
};

TEST_F(CrossEntropy, LossesAndGradients) {
  for (const std::size_t classes : {1, 2, 17, 256, 5003})
    for (const float spread : {1.0f, 30.0f}) {
      SCOPED_TRACE(testing::Message() << classes << " classes, spread " << spread);
      const std::size_t rows = 9;
      auto targets = random_tokens(rows, static_cast<std::int32_t>(classes), 1);
      targets[4] = kIgnoredTarget;
      const TestArray logits(Dtype::kF32, random_values(rows * classes, 2, spread));
      TestArray gradients = logits, untouched = logits, losses(Dtype::kF32, rows), again(Dtype::kF32, rows);
      cross_entropy(threads_, classes, targets, gradients.f32(), true, 0.5f, losses.f32());
      cross_entropy(threads_, classes, targets, untouched.f32(), false, 0.5f, again.f32());
      EXPECT_EQ(untouched.bytes(), logits.bytes());
      EXPECT_EQ(losses.bytes(), again.bytes());
      std::vector<Row> reference;
      for (std::size_t row = 0; row < rows; ++row) reference.emplace_back(logits, row, classes);
      const auto loss = [&](std::size_t row) {
        if (targets[row] == kIgnoredTarget) return 0.0;
        return std::log(reference[row].sum) + reference[row].largest - logits[row * classes + targets[row]];
      };
      const auto gradient = [&](std::size_t i) {
        const std::size_t row = i / classes;
        if (targets[row] == kIgnoredTarget) return 0.0;
        const double softmax = std::exp(logits[i] - reference[row].largest) / reference[row].sum;
        return 0.5 * (softmax - (static_cast<std::size_t>(targets[row]) == i % classes ? 1 : 0));
      };
      expect_close(losses, loss, 1e-6, 1e-6, "loss");
      expect_close(gradients, gradient, 3e-6, 1e-7, "gradient");
    }
}

TEST_F(CrossEntropy, LargeLogitsDoNotOverflow) {
  TestArray logits(Dtype::kF32, std::vector<float>{3e38f, -3e38f, 0, 3e38f}), losses(Dtype::kF32, 1);
  cross_entropy(threads_, 4, std::vector<std::int32_t>{0}, logits.f32(), true, 1, losses.f32());
  EXPECT_NEAR(losses[0], std::log(2.0), 1e-6);
  expect_close(
      logits, [](auto i) { return i == 0   ? -0.5
                                  : i == 3 ? 0.5
                                           : 0; }, 0, 1e-6);
}

TEST_F(CrossEntropy, ALogitThatIsNotFiniteGivesALossThatIsNot) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float bad : {kInf, std::numeric_limits<float>::quiet_NaN()})
    for (const std::size_t where : {0, 40, 99}) {
      std::vector<float> values = random_values(100, 1);
      values[where] = bad;
      TestArray logits(Dtype::kF32, values), losses(Dtype::kF32, 1);
      cross_entropy(threads_, 100, std::vector<std::int32_t>{7}, logits.f32(), true, 1, losses.f32());
      EXPECT_FALSE(std::isfinite(losses[0])) << bad << " at " << where;
    }
}

TEST_F(CrossEntropy, TargetsOutsideOfTheClassesAreRefused) {
  TestArray logits(Dtype::kF32, 20), losses(Dtype::kF32, 2);
  for (const std::int32_t bad : {10, -2})
    EXPECT_THROW(
        cross_entropy(threads_, 10, std::vector<std::int32_t>{3, bad}, logits.f32(), true, 1, losses.f32()),
        Error);
}

TEST_F(CrossEntropy, SumInOrderIsInF64) {
  EXPECT_EQ(sum_in_order({}), 0);
  EXPECT_EQ(sum_in_order(std::vector<float>{1e8f, 1, -1e8f, 0.5f}), 1.5);
}

TEST(SameBits, CrossEntropy) {
  expect_same_bits([](Threads& threads) {
    const std::size_t rows = 30, classes = 5003;
    const auto targets = random_tokens(rows, classes, 1);
    TestArray logits(Dtype::kF32, random_values(rows * classes, 2, 4)), losses(Dtype::kF32, rows);
    cross_entropy(threads, classes, targets, logits.f32(), true, 0.125f, losses.f32());
    return logits.bytes() + losses.bytes();
  });
}

}  // namespace sluice::kernels::loss_test
