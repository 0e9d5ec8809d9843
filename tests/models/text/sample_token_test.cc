#include "core/error.h"
#include "models/text/generate.h"
#include "testing.h"

namespace sluice::models::sample_token_test {

const std::array<float, 4> kLogits = {std::log(0.1f), std::log(0.4f), std::log(0.2f), std::log(0.3f)};

std::int32_t sample(const Sampling& sampling, double uniform) {
  return sample_token(kLogits, sampling, uniform);
}

TEST(SampleTokenTest, ZeroTemperatureTakesTheLikeliest) { EXPECT_EQ(sample({0, 0, 1}, 0.999), 1); }

TEST(SampleTokenTest, TheUniformNumberChoosesByLikelihood) {
  // The tokens by likelihood are 1 (0.4), 3 (0.3), 2 (0.2), 0 (0.1).
  EXPECT_EQ(sample({1, 0, 1}, 0.0), 1);
  EXPECT_EQ(sample({1, 0, 1}, 0.39), 1);
  EXPECT_EQ(sample({1, 0, 1}, 0.41), 3);
  EXPECT_EQ(sample({1, 0, 1}, 0.71), 2);
  EXPECT_EQ(sample({1, 0, 1}, 0.91), 0);
  EXPECT_EQ(sample({1, 0, 1}, 0.9999999), 0);
}

TEST(SampleTokenTest, TopKAndTopPCutTheTail) {
  EXPECT_EQ(sample({1, 2, 1}, 0.999), 3);     // among 0.4 and 0.3
  EXPECT_EQ(sample({1, 2, 1}, 0.56), 1);      // 0.4 / 0.7 = 0.571
  EXPECT_EQ(sample({1, 0, 0.65}, 0.999), 3);  // 0.4 is too little, 0.7 is enough
  EXPECT_EQ(sample({1, 0, 0.1}, 0.999), 1);   // one always stays
}

TEST(SampleTokenTest, TemperatureSharpens) {
  // The squared weights are 0.16, 0.09, 0.04, 0.01 of 0.30.
  EXPECT_EQ(sample({0.5, 0, 1}, 0.53), 1);
  EXPECT_EQ(sample({0.5, 0, 1}, 0.54), 3);
}

TEST(SampleTokenTest, EqualLogitsAreOrderedByToken) {
  const std::array<float, 3> equal = {1, 1, 1};
  EXPECT_EQ(sample_token(equal, {1, 1, 1}, 0.5), 0);
}

TEST(SampleTokenTest, LogitsThatAreNotFiniteAreAnError) {
  const std::array<float, 2> bad = {0, std::numeric_limits<float>::quiet_NaN()};
  EXPECT_THROW(sample_token(bad, {1, 0, 1}, 0.5), Error);
}

}  // namespace sluice::models::sample_token_test
