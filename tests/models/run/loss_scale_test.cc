#include "models/run/loss_scale.h"

#include "models/run/training_setup.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::models::loss_scale_test {

// The sequence is checked against torch.amp.GradScaler in tests/python/cli/test_loss_scale.py.
TEST(LossScaleTest, HalvesWhenAStepIsSkippedAndDoublesAfterAnIntervalOfGoodOnes) {
  LossScale scale = LossScale::dynamic(65536, 3);
  std::vector<float> found;
  for (const char step : std::string("gggg!gg!ggg!!gggggg")) {
    if (step == '!')
      scale.skipped("test");
    else
      scale.applied();
    found.push_back(scale.value() / 65536);
  }
  EXPECT_EQ(found, (std::vector<float>{1, 1, 2, 2, 1, 1, 1, 0.5, 0.5, 0.5, 1, 0.5, 0.25, 0.25, 0.25, 0.5, 0.5,
                                       0.5, 1}));
}

TEST(LossScaleTest, StaysFinite) {
  LossScale scale = LossScale::dynamic(0x1p127, 1);
  scale.applied();
  EXPECT_EQ(scale.value(), 0x1p127f);
}

TEST(LossScaleTest, AFixedOneStays) {
  LossScale scale = LossScale::fixed(128);
  for (int i = 0; i < 5000; ++i) scale.applied();
  EXPECT_EQ(scale.value(), 128);
  EXPECT_FALSE(scale.is_dynamic());
  EXPECT_EQ(thrown_by([&] { scale.skipped("test"); }).code, ErrorCode::kInternal);
}

TEST(LossScaleTest, AFixedOneIsOneThatCanBeDividedBy) {
  for (const double wrong : {0.0, -1.0, 1e-40, 1e39})
    EXPECT_EQ(thrown_by([&] { LossScale::fixed(wrong); }).code, ErrorCode::kInvalidArgument) << wrong;
}

TEST(LossScaleTest, GivesUpWhereNoScaleIsToBlame) {
  LossScale scale = LossScale::dynamic(5, 100);
  scale.applied();
  scale.skipped("the gradient of 'a' is not finite");
  scale.skipped("the gradient of 'b' is not finite");
  expect_error(ErrorCode::kNotFinite, {"below 1", "3 steps in a row", "'c'"},
               [&] { scale.skipped("the gradient of 'c' is not finite"); });
}

TEST(LossScaleTest, GoesOnFromItsState) {
  LossScale scale = LossScale::dynamic(1024, 4);
  scale.applied();
  scale.skipped("test");
  for (int i = 0; i < 3; ++i) scale.applied();
  LossScale other = LossScale::dynamic(65536, 4);
  other.restore(Json::parse(scale.state().dump()), "a checkpoint");
  EXPECT_EQ(other, scale);
  other.applied();
  EXPECT_EQ(other.value(), 1024);
  for (const char* wrong :
       {R"({"scale":0.5,"applied":0,"skipped":0})", R"({"scale":null,"applied":0,"skipped":0})",
        R"({"scale":2,"applied":-1,"skipped":0})", R"({"scale":2,"applied":1})"}) {
    const Thrown error = thrown_by([&] { other.restore(Json::parse(wrong), "a checkpoint"); });
    EXPECT_EQ(error.code, ErrorCode::kInvalidArgument) << wrong;
    EXPECT_THAT(error.text, HasSubstr("a checkpoint"));
  }
}

TEST(LossScaleTest, IsDynamicOfItselfForF16Alone) {
  TrainSettings settings;
  EXPECT_EQ(loss_scale_of(settings), LossScale::fixed(1));
  settings.dtype = Dtype::kBf16;
  EXPECT_EQ(loss_scale_of(settings), LossScale::fixed(1));
  settings.dtype = Dtype::kF16;
  EXPECT_EQ(loss_scale_of(settings), LossScale::dynamic(65536, 2000));
  settings.initial_scale = 512;
  settings.scale_growth_interval = 7;
  EXPECT_EQ(loss_scale_of(settings), LossScale::dynamic(512, 7));
  settings.dtype = Dtype::kF32;
  settings.loss_scale = "dynamic";
  EXPECT_EQ(loss_scale_of(settings), LossScale::dynamic(512, 7));
  settings = {};
  settings.loss_scale = "0.25";
  EXPECT_EQ(loss_scale_of(settings), LossScale::fixed(0.25));
}

TEST(LossScaleTest, WhatIsNoScaleIsRefused) {
  const auto text = [](const char* scale, std::optional<double> initial,
                       std::optional<std::size_t> interval) {
    TrainSettings settings;
    settings.loss_scale = scale;
    settings.initial_scale = initial;
    settings.scale_growth_interval = interval;
    const Thrown error = thrown_by([&] { loss_scale_of(settings); });
    EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
    return error.text;
  };
  for (const char* scale : {"", "0", "-2", "inf", "nan", "1e60", "64k", " 64", "static"})
    EXPECT_THAT(text(scale, {}, {}),
                HasSubstr("loss-scale must be dynamic, or a number above 0 that is finite"))
        << scale;
  EXPECT_THAT(text("128", 2, {}), HasSubstr("initial-scale is given"));
  EXPECT_THAT(text("128", {}, 2), HasSubstr("scale-growth-interval is given"));
  for (const double initial : {0.5, -1.0, std::numeric_limits<double>::infinity()})
    EXPECT_THAT(text("dynamic", initial, {}),
                HasSubstr("initial-scale must be a number of at least 1 that is finite"));
  EXPECT_THAT(text("dynamic", {}, 0), HasSubstr("at least 1 step"));
}

}  // namespace sluice::models::loss_scale_test
