#include "tests/bindings/c/support.h"
#include "tests/plain_sgemm.h"

// Tests of matrix products by the caller's BLAS, and of which parameters they are for.
namespace sluice_c_test::muon_test {

std::atomic<int> calls{0};

void counting_sgemm(const char* transpose_a, const char* transpose_b, const int* m, const int* n,
                    const int* k, const float* alpha, const float* a, const int* lda, const float* b,
                    const int* ldb, const float* beta, float* c, const int* ldc) {
  ++calls;
  sluice::test::plain_sgemm(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

constexpr uint64_t kShape[] = {20, 30};
constexpr uint64_t kElements = kShape[0] * kShape[1];

EngineHandle engine_with(sluice_sgemm sgemm, bool by_elements,
                         const std::vector<sluice_setting>& settings = {}) {
  const ModelHandle model = model_of(1, [&](uint32_t, sluice_parameter& given) {
    given.shape = kShape;
    given.dimensions = 2;
    given.by_elements = by_elements ? 1 : 0;
  });
  Choice setup;
  setup.optimizer = "muon";
  sluice_engine_options options = options_of(setup, nullptr);
  options.sgemm = sgemm;
  options.settings = settings.data();
  options.setting_count = settings.size();
  return engine_of(model.get(), options);
}

std::vector<float> trained(const EngineHandle& engine) {
  EXPECT_OK(sluice_engine_set_values(engine.get(), 0, start_values, nullptr));
  for (int step = 0; step < 3; ++step) {
    EXPECT_OK(sluice_engine_begin_step(engine.get(), nullptr));
    EXPECT_OK(sluice_engine_acquire(engine.get(), 0, SLUICE_GRADIENT));
    std::vector<float> gradient(kElements);
    for (uint64_t i = 0; i < kElements; ++i) gradient[i] = start_value(7 + static_cast<uint32_t>(step), i);
    EXPECT_OK(sluice_engine_add_gradient(engine.get(), 0, gradient.data(), SLUICE_F32));
    EXPECT_OK(sluice_engine_release(engine.get(), 0));
    EXPECT_OK(apply(engine.get()));
  }
  Values values(1);
  EXPECT_OK(sluice_engine_get_values(engine.get(), 0, collect, &values));
  return values[0];
}

float furthest(const std::vector<float>& a, const std::vector<float>& b) {
  float most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

TEST(Muon, MultipliesWithWhatTheCallerGives) {
  calls = 0;
  const std::vector<float> own = trained(engine_with(counting_sgemm, false));
  EXPECT_EQ(calls, 3 * 5 * 3);  // steps, iterations, products in each
  const std::vector<float> library = trained(engine_with(nullptr, false));
  EXPECT_EQ(calls, 45);
  EXPECT_LT(furthest(own, library), 1e-5);
  EXPECT_GT(
      furthest(own, trained(engine_with(counting_sgemm, false, {{"muon_scale", 0, "match_rms_adamw"}}))),
      1e-3);
  EXPECT_GT(furthest(own, trained(engine_with(counting_sgemm, false, {{"nesterov", 0, nullptr}}))), 1e-4);
}

TEST(Muon, LeavesToAdamWWhatIsToBeUpdatedByElements) {
  calls = 0;
  const EngineHandle engine = engine_with(counting_sgemm, true);
  EXPECT_GT(furthest(trained(engine), trained(engine_with(counting_sgemm, false))), 1e-3);
  EXPECT_EQ(calls, 45);
}

TEST(Muon, RefusesWhatItDoesNotHave) {
  Choice setup;
  setup.optimizer = "muon";
  const ModelHandle model = make_model();
  const auto refused = [&](const sluice_setting& setting, const std::vector<std::string>& parts) {
    sluice_engine_options options = options_of(setup, nullptr);
    options.settings = &setting;
    options.setting_count = 1;
    sluice_engine* engine = nullptr;
    expect_error(sluice_engine_create(model.get(), &options, &engine), SLUICE_INVALID_ARGUMENT, parts);
    EXPECT_EQ(engine, nullptr);
    expect_error(sluice_optimizer_check(setup.optimizer, &setting, 1), SLUICE_INVALID_ARGUMENT, parts);
  };
  refused({"muon_scale", 0, "large"}, {"'large'", "match_rms_adamw"});
  refused({"muon_scale", 1, nullptr}, {"muon_scale is 1", "match_rms_adamw"});
  refused({"muon_scale", 1, "original"}, {"muon_scale", "'original' and as 1"});
  refused({"nesterov", 2, nullptr}, {"nesterov is 2", "true or false"});
  refused({"momentum", 0, "much"}, {"momentum is 'much'", "below 1"});
  refused({"clip_threshold", 1, nullptr}, {"clip_threshold"});
  refused({nullptr, 1, nullptr}, {"sluice_setting.name"});
  setup.optimizer = "adamw";
  refused({"nesterov", 0, nullptr}, {"nesterov", "adamw"});
  const sluice_setting twice[] = {{"beta1", 0.5, nullptr}, {"beta1", 0.5, nullptr}},
                       two_names[] = {{"beta1", 0.5, nullptr}, {"betas[0]", 0.5, nullptr}};
  for (const sluice_setting* settings : {twice, two_names})
    expect_error(sluice_optimizer_check("adamw", settings, 2), SLUICE_INVALID_ARGUMENT, {"beta1", "twice"});
  expect_error(sluice_optimizer_check("adamw", nullptr, 1), SLUICE_INVALID_ARGUMENT, {"'settings' is NULL"});
  expect_error(sluice_optimizer_check("adamw", twice, SIZE_MAX), SLUICE_INVALID_ARGUMENT, {"in all"});
  expect_error(sluice_optimizer_check("adamax", nullptr, 0), SLUICE_INVALID_ARGUMENT, {"'adamax'", "adamw"});
  EXPECT_OK(sluice_optimizer_check("adamw", twice, 1));
}

}  // namespace sluice_c_test::muon_test
