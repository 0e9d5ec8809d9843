#include "models/run/recipe.h"

#include "core/error.h"
#include "models/families/config.h"
#include "models/model/model.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::models::recipe_test {

TrainSettings with(const std::string& optimizer) {
  TrainSettings settings;
  settings.optimizer.name = optimizer;
  return settings;
}

// The parameters in blocks, as publications count them: 12 layers width^2.
double published_size(double layers, double width) { return 12 * layers * width * width; }

TEST(RecipeTest, AdamwHasThePublishedRateOfEachSize) {
  struct Case {
    double layers, width, rate;
  };
  // These are of Brown et al. 2020, table 2.1.
  for (const Case& c :
       {Case{12, 768, 6e-4}, Case{24, 1024, 3e-4}, Case{24, 1536, 2.5e-4}, Case{24, 2048, 2e-4},
        Case{32, 2560, 1.6e-4}, Case{32, 4096, 1.2e-4}, Case{40, 5140, 1e-4}, Case{96, 12288, 0.6e-4}})
    EXPECT_DOUBLE_EQ(make_recipe(with("adamw"), {published_size(c.layers, c.width)}).learning_rate, c.rate);
  // These are nanoGPT's model of characters, and sizes beyond the table.
  EXPECT_DOUBLE_EQ(make_recipe(with("adamw"), {published_size(6, 384)}).learning_rate, 1e-3);
  EXPECT_DOUBLE_EQ(make_recipe(with("adamw"), {1}).learning_rate, 1.3e-3);
  EXPECT_DOUBLE_EQ(make_recipe(with("adamw"), {1e13}).learning_rate, 6e-5);
}

TEST(RecipeTest, LargerModelsNeverHaveLargerRates) {
  double last = 1;
  for (double size = 1e5; size < 1e12; size *= 1.07) {
    const double rate = make_recipe(with("adamw"), {size}).learning_rate;
    EXPECT_LE(rate, last) << size;
    last = rate;
  }
}

TEST(RecipeTest, EachOptimizerHasItsOwn) {
  const RecipeBasis basis = {published_size(12, 768)};
  const auto expect = [&](const TrainSettings& settings, double rate, double decay) {
    const Recipe recipe = make_recipe(settings, basis);
    EXPECT_DOUBLE_EQ(recipe.learning_rate, rate) << settings.optimizer.name;
    EXPECT_DOUBLE_EQ(recipe.weight_decay, decay) << settings.optimizer.name;
    EXPECT_FALSE(recipe.adamw_learning_rate) << settings.optimizer.name;
  };
  expect(with("adamw"), 6e-4, 0.1);
  expect(with("adam"), 6e-4, 0);
  expect(with("lion"), 2e-4, 0.3);
  expect(with("sgd"), 0.5, 0);
  expect(with("adafactor"), 1e-2, 0);
  expect(with("muon"), 6e-4, 0.1);
  TrainSettings settings = with("sgd");
  settings.optimizer.settings["momentum"] = 0.9;
  expect(settings, 0.05, 0);
  settings = with("adafactor");
  settings.optimizer.settings["scale_parameter"] = false;
  expect(settings, 6e-4, 0);
  settings.optimizer.settings["relative_step"] = true;
  expect(settings, 1, 0);
}

TEST(RecipeTest, MuonsOriginalScaleLeavesAdamwItsOwnRate) {
  TrainSettings settings = with("muon");
  settings.optimizer.settings["muon_scale"] = "original";
  const Recipe recipe = make_recipe(settings, {published_size(12, 768)});
  EXPECT_DOUBLE_EQ(recipe.learning_rate, 0.02);
  EXPECT_DOUBLE_EQ(recipe.adamw_learning_rate.value_or(0), 6e-4);
  EXPECT_DOUBLE_EQ(recipe.weight_decay, 0.01);
  settings.learning_rate = 0;
  EXPECT_FALSE(make_recipe(settings, {1e6}).adamw_learning_rate);
}

TEST(RecipeTest, WeightsTakeATenth) {
  const RecipeBasis weights = {published_size(12, 768), false};
  EXPECT_DOUBLE_EQ(make_recipe(with("adamw"), weights).learning_rate, 6e-5);
  EXPECT_DOUBLE_EQ(make_recipe(with("adafactor"), weights).learning_rate, 1e-3);
  EXPECT_DOUBLE_EQ(make_recipe(with("adamw"), weights).weight_decay, 0.1);
}

TEST(RecipeTest, TheWarmupIsAShareOfTheStepsWithinBounds) {
  TrainSettings settings = with("adamw");
  for (const auto& [steps, warmup] :
       {std::pair{1u, 40u}, {400u, 40u}, {450u, 45u}, {20'000u, 2000u}, {600'000u, 2000u}}) {
    settings.steps = steps;
    EXPECT_EQ(make_recipe(settings, {1e6}).warmup, warmup) << steps;
  }
}

TEST(RecipeTest, WhatIsStatedWinsAndIsNoDefault) {
  TrainSettings settings = with("adamw");
  EXPECT_THAT(make_recipe(settings, {1e6}).defaults,
              ElementsAre("lr", "warmup", "schedule", "final-lr", "clip", "weight-decay"));
  settings.learning_rate = 0;
  settings.warmup = 0;
  settings.schedule = "constant";
  settings.clip = 0;
  settings.weight_decay = 0;
  const Recipe recipe = make_recipe(settings, {1e6});
  EXPECT_EQ(to_json(recipe), (Json{{"lr", 0.0},
                                   {"warmup", 0},
                                   {"schedule", "constant"},
                                   {"final-lr", 0.1},
                                   {"clip", 0.0},
                                   {"weight-decay", 0.0}}));
  EXPECT_THAT(recipe.defaults, ElementsAre("final-lr"));
}

Json record_of(const Recipe& recipe) {
  return {{"hyperparameters", to_json(recipe)}, {"defaults", recipe.defaults}};
}

TEST(RecipeTest, AResumedRunKeepsItsCheckpoints) {
  TrainSettings first = with("muon");
  first.adamw_learning_rate = 2e-4;
  first.schedule = "linear";
  first.steps = 1000;
  const Json record = record_of(make_recipe(first, {1e6}));
  TrainSettings later = with("muon");
  later.steps = 5000;  // whose default warm-up is 500
  later.clip = 0.5;
  const Recipe recipe = make_recipe(later, {1e9}, &record, "a checkpoint");
  EXPECT_EQ(recipe.warmup, 100u);
  EXPECT_EQ(recipe.schedule, "linear");
  EXPECT_EQ(recipe.learning_rate, make_recipe(first, {1e6}).learning_rate);
  EXPECT_EQ(recipe.adamw_learning_rate, 2e-4);
  EXPECT_EQ(recipe.clip, 0.5);
  EXPECT_THAT(recipe.defaults, ElementsAre("lr", "warmup", "final-lr", "weight-decay"));
}

TEST(RecipeTest, ARecordThatIsNoneIsNamed) {
  Json record = record_of(make_recipe(with("adamw"), {1e6}));
  record["hyperparameters"]["warmup"] = "long";
  expect_error(ErrorCode::kInvalidArgument, {"out/step-00000001: 'warmup'"},
               [&] { make_recipe(with("adamw"), {1e6}, &record, "out/step-00000001"); });
}

TEST(RecipeTest, ThePartsOfMuonThatContradictEachOtherAreRefused) {
  TrainSettings settings = with("muon");
  settings.learning_rate = 0;
  settings.adamw_learning_rate = 1e-4;
  EXPECT_THROW(make_recipe(settings, {1e6}), Error);
}

TEST(RecipeTest, TheTextNamesWhatIsADefaultAndWhatItIsFor) {
  TrainSettings settings = with("adamw");
  settings.clip = 0.5;
  const RecipeBasis basis = {85e6};
  const std::string text = to_text(make_recipe(settings, basis), settings, basis);
  EXPECT_THAT(text,
              HasSubstr("0.0006 of adamw, a warm-up of 40 steps, then cosine to 0.1 of it at step 100"));
  settings.steps = 6;
  EXPECT_THAT(to_text(make_recipe(settings, basis), settings, basis),
              HasSubstr("a warm-up of 40 steps, in which this run ends\n"));
  EXPECT_THAT(text, HasSubstr("weight decay      0.1; gradients clipped to a norm of 0.5\n"));
  EXPECT_THAT(text, HasSubstr("lr, warmup, schedule, final-lr, weight-decay: for adamw, 85 million"));
}

}  // namespace sluice::models::recipe_test
