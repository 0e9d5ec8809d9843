#include "tests/bindings/c/support.h"

// Tests of gradients that a caller reads, scales, keeps and drops, on any tier, as far as that is not behind
// every wrapped model's p.grad (tests/python/torch/test_gradients.py).
namespace sluice_c_test::gradients_test {

constexpr uint32_t kLast = 4, kLastUnit = 2;

class GradientsTest : public ::testing::TestWithParam<const char*> {
 protected:
  GradientsTest() { set_start_values(engine_.get()); }
  static void add(sluice_engine* engine, float value) {
    const std::vector<float> gradient(parameters()[kLast].elements(), value);
    EXPECT_OK(sluice_engine_acquire(engine, kLastUnit, SLUICE_GRADIENT_ONLY));
    EXPECT_OK(sluice_engine_add_gradient(engine, kLast, gradient.data(), SLUICE_F32));
    EXPECT_OK(sluice_engine_release(engine, kLastUnit));
  }
  static std::vector<float> gradient_of_last(sluice_engine* engine) {
    std::vector<float> gradient(parameters()[kLast].elements());
    EXPECT_OK(sluice_engine_get_gradient(engine, kLast, gradient.data(), SLUICE_F32));
    return gradient;
  }

  Folder folder_;
  EngineHandle engine_ = make_engine({.place = GetParam()}, folder_.path());
};
INSTANTIATE_TEST_SUITE_P(Places, GradientsTest, ::testing::Values("memory", "disk"));

TEST_P(GradientsTest, InTheMemoryOfParametersAreRefusedWhereThatMayBeAbsent) {
  const void* values = nullptr;
  EXPECT_OK(sluice_engine_parameter(engine_.get(), kLast, &values));
  EXPECT_OK(sluice_engine_begin_step(engine_.get(), nullptr));
  EXPECT_OK(sluice_engine_acquire(engine_.get(), kLastUnit, SLUICE_GRADIENT_ONLY));
  expect_error(sluice_engine_add_gradient(engine_.get(), kLast, values, SLUICE_F32), SLUICE_INVALID_ARGUMENT,
               {"'gradient'", "memory of the parameters of unit", "not acquired", "copy"});
  EXPECT_OK(sluice_engine_acquire(engine_.get(), kLastUnit, SLUICE_GRADIENT));
  EXPECT_OK(sluice_engine_add_gradient(engine_.get(), kLast, values, SLUICE_F32));
  expect_error(sluice_engine_get_gradient(engine_.get(), kLast, const_cast<void*>(values), SLUICE_F32),
               SLUICE_INVALID_ARGUMENT, {"'data'", "not acquired for editing"});
  const std::vector<float> added = gradient_of_last(engine_.get());
  EXPECT_EQ(0, std::memcmp(added.data(), values, added.size() * sizeof(float)));
  EXPECT_OK(sluice_engine_abandon_step(engine_.get()));
}

// Several come at once; what one parameter of them lacks, or an array that is not there, is an error.
TEST_P(GradientsTest, OfSeveralParametersAreOneCall) {
  sluice_engine* const engine = engine_.get();
  EXPECT_OK(sluice_engine_begin_step(engine, nullptr));
  add(engine, 0.5f);
  const uint32_t twice[] = {kLast, kLast}, unknown[] = {kLast, 99}, without[] = {kLast, 0};
  double norms[2] = {};
  EXPECT_OK(sluice_engine_multiply_gradients(engine, twice, 2, 2));
  EXPECT_OK(sluice_engine_gradient_norms(engine, twice, 2, norms));
  EXPECT_NEAR(norms[0], 2 * std::sqrt(600000.0), 1e-6);
  EXPECT_EQ(norms[0], norms[1]);
  expect_error(sluice_engine_multiply_gradients(engine, unknown, 2, 2), SLUICE_INVALID_ARGUMENT, {"99"});
  expect_error(sluice_engine_gradient_norms(engine, without, 2, norms), SLUICE_STATE, {"no gradient"});
  expect_error(sluice_engine_gradient_norms(engine, twice, 2, nullptr), SLUICE_INVALID_ARGUMENT, {"norms"});
  expect_error(sluice_engine_drop_gradients(engine, nullptr, 2), SLUICE_INVALID_ARGUMENT, {"parameters"});
  EXPECT_EQ(gradient_of_last(engine), std::vector<float>(parameters()[kLast].elements(), 2));
  EXPECT_OK(sluice_engine_drop_gradients(engine, nullptr, 0));
  EXPECT_OK(sluice_engine_drop_gradients(engine, without, 2));
  uint32_t has = 1;
  EXPECT_OK(sluice_engine_has_gradient(engine, kLast, &has));
  EXPECT_EQ(has, 0U);
}

TEST_P(GradientsTest, ThatAreNotFiniteAreKeptAndNamed) {
  const Values before = values_of(engine_.get());
  EXPECT_OK(sluice_engine_begin_step(engine_.get(), nullptr));
  add(engine_.get(), std::numeric_limits<float>::infinity());
  double norm = 0;
  EXPECT_OK(norm_of_gradient(engine_.get(), kLast, &norm));
  EXPECT_TRUE(std::isinf(norm));
  expect_error(apply(engine_.get(), 0, nullptr, true), SLUICE_NOT_FINITE, {"'last.weight'"});
  EXPECT_TRUE(std::isinf(gradient_of_last(engine_.get())[0]));
  EXPECT_TRUE(values_of(engine_.get()) == before);
  uint64_t steps = 9;
  EXPECT_OK(sluice_engine_steps(engine_.get(), &steps));
  EXPECT_EQ(steps, 0u);
}

}  // namespace sluice_c_test::gradients_test
