#include "tests/bindings/c/support.h"

// Tests of frozen units, which are read like any other, are never updated, and have no state.
namespace sluice_c_test::frozen_test {

constexpr uint32_t kFrozenUnit = 1, kWeight = 2, kScale = 3;

class FrozenTest : public ::testing::TestWithParam<sluice_dtype> {
 protected:
  EngineHandle fresh(const char* place, uint32_t frozen = 1u << kFrozenUnit) {
    Choice setup;
    setup.place = place;
    setup.dtype = GetParam();
    setup.frozen = frozen;
    return make_engine(setup, folder_.path());
  }
  EngineHandle trained(const char* place, int steps) {
    EngineHandle engine = fresh(place);
    set_start_values(engine.get());
    train(engine.get(), GetParam(), steps, kFrozenUnit);
    return engine;
  }
  float held(uint32_t parameter, uint64_t i) const {
    const float start = start_value(parameter, i);
    if (GetParam() == SLUICE_F32) return start;
    uint32_t bits = 0;
    std::memcpy(&bits, &start, 4);
    const auto narrow = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    return widen(&narrow, SLUICE_BF16, 0);
  }
  Folder folder_;
};

INSTANTIATE_TEST_SUITE_P(Types, FrozenTest, ::testing::Values(SLUICE_F32, SLUICE_BF16));

TEST_P(FrozenTest, TheSameBitsInMemoryAndOnDisk) {
  const Values memory = values_of(trained("memory", 3).get());
  EXPECT_TRUE(values_of(trained("disk", 3).get()) == memory);
  for (const uint32_t p : {kWeight, kScale})
    for (uint64_t i = 0; i < memory[p].size(); ++i) ASSERT_EQ(memory[p][i], held(p, i)) << p << " " << i;
  EXPECT_NE(memory[0][0], start_value(0, 0));
}

TEST_P(FrozenTest, ACheckpointHoldsThemAsParametersAlone) {
  const EngineHandle engine = trained("disk", 2);
  ASSERT_OK(sluice_engine_save(engine.get(), folder_.path("out").c_str(), 1, nullptr));
  train(engine.get(), GetParam(), 2, kFrozenUnit);
  const EngineHandle other = fresh("memory");
  ASSERT_OK(sluice_engine_load(other.get(), folder_.path("out").c_str()));
  train(other.get(), GetParam(), 2, kFrozenUnit);
  EXPECT_TRUE(values_of(other.get()) == values_of(engine.get()));
  const EngineHandle unfrozen = fresh("memory", 0);
  expect_error(sluice_engine_load(unfrozen.get(), folder_.path("out").c_str()), SLUICE_INVALID_ARGUMENT,
               {"'middle.weight'", "optimizer."});
}

TEST_P(FrozenTest, TheirGradientsAreRefused) {
  const EngineHandle engine = fresh("disk");
  set_start_values(engine.get());
  ASSERT_OK(sluice_engine_begin_step(engine.get(), nullptr));
  for (const sluice_access access : {SLUICE_GRADIENT, SLUICE_GRADIENT_ONLY})
    expect_error(sluice_engine_acquire(engine.get(), kFrozenUnit, access), SLUICE_INVALID_ARGUMENT,
                 {"'unit.1'", "frozen"});
  const float gradient = 1;
  expect_error(sluice_engine_add_gradient(engine.get(), kScale, &gradient, SLUICE_F32),
               SLUICE_INVALID_ARGUMENT, {"'scale'", "'unit.1'", "frozen"});
  double norm = 0;
  expect_error(norm_of_gradient(engine.get(), kScale, &norm), SLUICE_STATE, {"'scale'"});
  EXPECT_OK(drop_gradient(engine.get(), kScale));
  EXPECT_OK(apply(engine.get()));
}

TEST(FrozenUnitTest, AUnitIsAllFrozenOrAllTrainable) {
  sluice_model* made = nullptr;
  ASSERT_OK(sluice_model_create(&made));
  const ModelHandle model = {made, sluice_model_destroy};
  ASSERT_OK(sluice_model_add_unit(made, "mixed", nullptr));
  for (const char* name : {"trained", "frozen"}) {
    sluice_parameter given = SLUICE_INIT(sluice_parameter);
    given.name = name;
    given.frozen = name[0] == 'f' ? 1 : 0;
    ASSERT_OK(sluice_model_add_parameter(made, &given, nullptr));
  }
  sluice_engine_options options = options_of({}, nullptr);
  sluice_engine* engine = nullptr;
  expect_error(sluice_engine_create(made, &options, &engine), SLUICE_INVALID_ARGUMENT,
               {"'mixed'", "'trained'", "'frozen'"});
}

}  // namespace sluice_c_test::frozen_test
