#include "models/run/learning_rate.h"

#include "core/error.h"
#include "testing.h"

namespace sluice::models::learning_rate_test {

LearningRate rate(LearningRate::Shape shape) { return {2.0, 4, 14, 0.25, shape}; }

TEST(LearningRateTest, RisesInALineToThePeakWithTheLastWarmupStep) {
  for (const auto shape :
       {LearningRate::Shape::kConstant, LearningRate::Shape::kCosine, LearningRate::Shape::kLinear}) {
    EXPECT_DOUBLE_EQ(rate(shape).at(1), 0.5);
    EXPECT_DOUBLE_EQ(rate(shape).at(3), 1.5);
    EXPECT_DOUBLE_EQ(rate(shape).at(4), 2.0);
    EXPECT_DOUBLE_EQ(rate(shape).at(5), 2.0);
  }
}

TEST(LearningRateTest, ConstantStays) {
  EXPECT_DOUBLE_EQ(rate(LearningRate::Shape::kConstant).at(14), 2.0);
  EXPECT_DOUBLE_EQ(rate(LearningRate::Shape::kConstant).at(1000), 2.0);
}

TEST(LearningRateTest, LinearAndCosineEndAtTheFinalShareAndStayThere) {
  for (const auto shape : {LearningRate::Shape::kCosine, LearningRate::Shape::kLinear}) {
    EXPECT_NEAR(rate(shape).at(14), 0.5, 1e-12);
    EXPECT_NEAR(rate(shape).at(99), 0.5, 1e-12);
  }
}

TEST(LearningRateTest, IsHalfwayInTheMiddle) {
  // Step 10 is in the middle of steps 5 to 15.
  const LearningRate linear = {1.0, 4, 15, 0.2, LearningRate::Shape::kLinear};
  const LearningRate cosine = {1.0, 4, 15, 0.2, LearningRate::Shape::kCosine};
  EXPECT_NEAR(linear.at(10), 0.6, 1e-12);
  EXPECT_NEAR(cosine.at(10), 0.6, 1e-12);
  EXPECT_NEAR(linear.at(7), 1 - 0.8 * 0.2, 1e-12);
  EXPECT_NEAR(cosine.at(7), 0.2 + 0.4 * (1 + std::cos(M_PI * 0.2)), 1e-12);
}

TEST(LearningRateTest, ASingleStepAndAWarmupBeyondTheEndAreDefined) {
  const LearningRate one = {1.0, 0, 1, 0.1, LearningRate::Shape::kCosine};
  EXPECT_DOUBLE_EQ(one.at(1), 1.0);
  const LearningRate long_warmup = {1.0, 10, 5, 0.1, LearningRate::Shape::kLinear};
  EXPECT_DOUBLE_EQ(long_warmup.at(5), 0.5);
  EXPECT_DOUBLE_EQ(long_warmup.at(11), 1.0);
}

TEST(LearningRateTest, UnknownSchedulesAreRefused) {
  EXPECT_EQ(schedule_shape("cosine"), LearningRate::Shape::kCosine);
  EXPECT_THROW(schedule_shape("cosin"), Error);
}

}  // namespace sluice::models::learning_rate_test
