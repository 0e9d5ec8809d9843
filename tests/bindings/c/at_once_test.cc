#include "tests/bindings/c/support.h"

// Tests of updates that follow at once in backward, with gradients that are never stored.
namespace sluice_c_test::at_once_test {

void add(sluice_engine* engine, uint32_t parameter, float value) {
  const std::vector<float> gradient(parameters()[parameter].elements(), value);
  EXPECT_OK(sluice_engine_add_gradient(engine, parameter, gradient.data(), SLUICE_F32));
}

class AtOnceTest : public ::testing::TestWithParam<Case> {
 protected:
  EngineHandle fresh(bool at_once = true) {
    Choice setup;
    setup.place = GetParam().place;
    setup.dtype = dtype();
    setup.at_once = at_once;
    EngineHandle engine = make_engine(setup, folder_.path());
    set_start_values(engine.get());
    return engine;
  }
  static sluice_dtype dtype() { return GetParam().dtype; }
  static sluice_status begin(sluice_engine* engine, const StepSettings& given = {}) {
    return sluice_engine_begin_step(engine, &given.settings);
  }
  static sluice_status end(sluice_engine* engine, sluice_step_result* result = nullptr) {
    return sluice_engine_step(engine, nullptr, result);
  }
  static void add_alone(sluice_engine* engine, uint32_t parameter, float value) {
    EXPECT_OK(sluice_engine_acquire(engine, parameters()[parameter].unit, SLUICE_GRADIENT_ONLY));
    add(engine, parameter, value);
    EXPECT_OK(sluice_engine_release(engine, parameters()[parameter].unit));
  }

  Folder folder_;
};
INSTANTIATE_TEST_SUITE_P(Places, AtOnceTest,
                         ::testing::Values(Case{"memory", SLUICE_F32}, Case{"disk", SLUICE_BF16}), case_name);

TEST_P(AtOnceTest, BitsAreThoseOfUpdatesThatWait) {
  const EngineHandle waiting = fresh(false), at_once = fresh();
  for (int step = 0; step < 4; ++step) {
    std::array<sluice_step_result, 2> results = {SLUICE_INIT(sluice_step_result),
                                                 SLUICE_INIT(sluice_step_result)};
    ASSERT_OK(sluice_engine_begin_step(waiting.get(), nullptr));
    ASSERT_OK(begin(at_once.get()));
    for (const EngineHandle* engine : {&waiting, &at_once})
      for (uint32_t unit = kUnits; unit-- > 0;)
        if (step != 2 || unit != 1)
          add_unit_gradients(engine->get(), unit, dtype(), 0.01f * static_cast<float>(unit));
    ASSERT_OK(apply(waiting.get(), 0, results.data()));
    ASSERT_OK(end(at_once.get(), &results[1]));
    EXPECT_EQ(results[0].gradient_norm, results[1].gradient_norm);
    EXPECT_EQ(results[1].clip_factor, 1);
  }
  EXPECT_EQ(values_of(waiting.get()), values_of(at_once.get()));
}

TEST_P(AtOnceTest, ASecondGradientIsRefused) {
  const EngineHandle engine = fresh();
  ASSERT_OK(begin(engine.get()));
  add_alone(engine.get(), 4, 1);
  ASSERT_OK(sluice_engine_acquire(engine.get(), 2, SLUICE_GRADIENT));
  const std::vector<float> gradient(parameters()[4].elements(), 1.0f);
  expect_error(sluice_engine_add_gradient(engine.get(), 4, gradient.data(), SLUICE_F32), SLUICE_STATE,
               {"'last.weight'", "second gradient", "accumulate"});
  ASSERT_OK(sluice_engine_release(engine.get(), 2));
  ASSERT_OK(end(engine.get()));
  ASSERT_OK(begin(engine.get()));
  add_alone(engine.get(), 4, 1);  // belongs to the next step
  EXPECT_OK(end(engine.get()));
}

TEST_P(AtOnceTest, AGradientThatIsNotFiniteLeavesItsUnitAsItWas) {
  const EngineHandle engine = fresh();
  const Values before = values_of(engine.get());
  ASSERT_OK(begin(engine.get()));
  ASSERT_OK(sluice_engine_acquire(engine.get(), 2, SLUICE_GRADIENT_ONLY));
  add(engine.get(), 4, std::numeric_limits<float>::quiet_NaN());
  expect_error(sluice_engine_release(engine.get(), 2), SLUICE_NOT_FINITE, {"'last.weight'"});
  ASSERT_OK(end(engine.get()));
  EXPECT_EQ(values_of(engine.get()), before);
  ASSERT_OK(begin(engine.get()));
  add_alone(engine.get(), 4, 1);
  ASSERT_OK(end(engine.get()));
  EXPECT_NE(values_of(engine.get()), before);
}

int ones(void*, uint32_t, uint64_t, float* values, uint64_t count) {
  std::fill_n(values, count, 1.0f);
  return 0;
}

// More units than memory has room for: one that stayed held would be missed by the others.
TEST(AtOnce, AnEditThatEndsWithARefusedUpdateHoldsNothing) {
  constexpr uint32_t kMany = 24;
  constexpr uint64_t kElements = uint64_t{1} << 21;
  const ModelHandle model = model_of(kMany, [&](uint32_t, sluice_parameter& given) {
    given.shape = &kElements;
    given.dimensions = 1;
  });
  const Folder folder;
  const std::string path = folder.path();
  const sluice_folder disk = {path.c_str(), uint64_t{1} << 30};
  Choice choice;
  choice.place = "disk";
  choice.at_once = true;
  choice.memory = uint64_t{180} << 20;
  sluice_engine_options options = options_of(choice, &disk);
  options.reserved = 1 << 20;
  const EngineHandle engine = engine_of(model.get(), options);
  sluice_engine* const created = engine.get();
  ASSERT_NE(created, nullptr);
  for (uint32_t u = 0; u < kMany; ++u) ASSERT_OK(sluice_engine_set_values(created, u, ones, nullptr));
  const StepSettings settings;
  const std::vector<float> gradient(kElements, std::numeric_limits<float>::quiet_NaN());
  for (uint32_t u = 0; u < kMany; ++u) {
    ASSERT_OK(sluice_engine_begin_step(created, &settings.settings));
    ASSERT_OK(sluice_engine_acquire(created, u, SLUICE_EDIT));
    ASSERT_OK(sluice_engine_acquire(created, u, SLUICE_GRADIENT));
    ASSERT_OK(sluice_engine_add_gradient(created, u, gradient.data(), SLUICE_F32));
    ASSERT_OK(sluice_engine_release(created, u));
    expect_error(sluice_engine_release(created, u), SLUICE_NOT_FINITE, {"unit." + std::to_string(u)});
    ASSERT_OK(sluice_engine_step(created, nullptr, nullptr));
  }
  EXPECT_OK(sluice_engine_settle(created));
}

TEST_P(AtOnceTest, AnAbandonedStepKeepsWhatWasApplied) {
  const EngineHandle engine = fresh(), other = fresh();
  ASSERT_OK(begin(engine.get()));
  add_alone(engine.get(), 4, 1);
  ASSERT_OK(sluice_engine_acquire(engine.get(), 0, SLUICE_GRADIENT));
  add(engine.get(), 0, 1);
  ASSERT_OK(sluice_engine_abandon_step(engine.get()));
  ASSERT_OK(begin(other.get()));
  add_alone(other.get(), 4, 1);
  ASSERT_OK(end(other.get()));
  EXPECT_EQ(values_of(engine.get()), values_of(other.get()));
  ASSERT_OK(begin(engine.get()));
  add_alone(engine.get(), 4, 1);  // the step before has ended
  EXPECT_OK(end(engine.get()));
}

TEST_P(AtOnceTest, SettingsComeWithTheBeginning) {
  const EngineHandle engine = fresh(), waiting = fresh(false);
  const StepSettings given;
  expect_error(sluice_engine_begin_step(engine.get(), nullptr), SLUICE_INVALID_ARGUMENT, {"'settings'"});
  expect_error(sluice_engine_begin_step(waiting.get(), &given.settings), SLUICE_INVALID_ARGUMENT,
               {"sluice_engine_step()"});
  StepSettings clipping, keeping;
  clipping.settings.clip = 1;
  expect_error(begin(engine.get(), clipping), SLUICE_INVALID_ARGUMENT, {"without clipping"});
  keeping.settings.keep_gradients = 1;
  expect_error(begin(engine.get(), keeping), SLUICE_INVALID_ARGUMENT, {"kept"});
  StepSettings below_zero;
  below_zero.settings.clip_value = -1;
  expect_error(begin(engine.get(), below_zero), SLUICE_INVALID_ARGUMENT, {"clip by value of -1"});
  ASSERT_OK(begin(engine.get()));
  expect_error(sluice_engine_step(engine.get(), &given.settings, nullptr), SLUICE_INVALID_ARGUMENT,
               {"sluice_engine_begin_step()"});
  EXPECT_OK(end(engine.get()));
}

}  // namespace sluice_c_test::at_once_test
