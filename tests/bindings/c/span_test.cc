#include "tests/bindings/c/support.h"

// Compares a parameter that spans three units with the same one in a single unit.
namespace sluice_c_test::span_test {

constexpr uint64_t kGrain = SLUICE_SPAN_GRAIN;
constexpr std::array<uint64_t, 2> kShape = {5, kGrain / 2};  // has 2.5 grains

struct Span {
  uint64_t first, elements;
};
const std::vector<Span> kWhole = {{0, 0}}, kSpans = {{0, kGrain}, {kGrain, kGrain}, {2 * kGrain, kGrain / 2}};

ModelHandle model_of(const std::vector<Span>& spans, sluice_dtype dtype) {
  sluice_model* model = nullptr;
  EXPECT_OK(sluice_model_create(&model));
  for (std::size_t i = 0; i < spans.size(); ++i) {
    EXPECT_OK(sluice_model_add_unit(model, ("table." + std::to_string(i)).c_str(), nullptr));
    sluice_parameter given = SLUICE_INIT(sluice_parameter);
    given.name = "table";
    given.shape = kShape.data();
    given.dimensions = kShape.size();
    given.span_first = spans[i].first;
    given.span_elements = spans[i].elements;
    given.dtype = dtype;
    EXPECT_OK(sluice_model_add_parameter(model, &given, nullptr));
  }
  return {model, sluice_model_destroy};
}

EngineHandle engine_of(const std::vector<Span>& spans, const char* place, sluice_dtype dtype,
                       const std::string& disk, sluice_status wanted = SLUICE_OK) {
  Choice setup{.place = place, .dtype = dtype, .held = 3};
  setup.no_master = dtype == SLUICE_BF16;  // the random words must be those of the whole parameter
  const sluice_folder folder = {disk.c_str(), 0};
  const sluice_engine_options options = options_of(setup, &folder);
  sluice_engine* engine = nullptr;
  EXPECT_EQ(sluice_engine_create(model_of(spans, dtype).get(), &options, &engine), wanted)
      << sluice_last_error();
  return {engine, sluice_engine_destroy};
}

void give_values(sluice_engine* engine, const std::vector<Span>& spans) {
  for (std::size_t i = 0; i < spans.size(); ++i) {
    uint64_t first = spans[i].first;
    ASSERT_OK(sluice_engine_set_values(
        engine, static_cast<uint32_t>(i),
        [](void* context, uint32_t, uint64_t at, float* values, uint64_t elements) {
          return start_values(nullptr, 0, *static_cast<uint64_t*>(context) + at, values, elements);
        },
        &first));
  }
}

// Returns the whole parameter as one array, at the address of its first span.
std::vector<float> trained(sluice_engine* engine, const std::vector<Span>& spans, sluice_dtype dtype,
                           int steps) {
  const uint64_t count = kShape[0] * kShape[1];
  std::vector<float> seen(count), gradient(count);
  const auto hold = [&] {
    for (uint32_t unit = 0; unit < spans.size(); ++unit)
      EXPECT_OK(sluice_engine_acquire(engine, unit, SLUICE_READ));
    const void* data = nullptr;
    EXPECT_OK(sluice_engine_parameter(engine, 0, &data));
    for (uint64_t i = 0; i < count; ++i) seen[i] = widen(data, dtype, i);
    for (uint32_t unit = 0; unit < spans.size(); ++unit) EXPECT_OK(sluice_engine_release(engine, unit));
  };
  for (int step = 0; step < steps; ++step) {
    EXPECT_OK(sluice_engine_begin_step(engine, nullptr));
    hold();
    for (uint64_t i = 0; i < count; ++i) gradient[i] = 0.1f * seen[i] + 0.01f;
    for (std::size_t i = 0; i < spans.size(); ++i) {
      const auto unit = static_cast<uint32_t>(i);
      EXPECT_OK(sluice_engine_acquire(engine, unit, SLUICE_GRADIENT_ONLY));
      EXPECT_OK(sluice_engine_add_gradient(engine, unit, gradient.data() + spans[i].first, SLUICE_F32));
      EXPECT_OK(sluice_engine_release(engine, unit));
    }
    EXPECT_OK(apply(engine, 0));
  }
  hold();
  return seen;
}

class SpanTest : public ::testing::TestWithParam<Case> {
 protected:
  EngineHandle fresh(const std::vector<Span>& spans) {
    EngineHandle engine = engine_of(spans, GetParam().place, dtype(), folder_.path());
    give_values(engine.get(), spans);
    return engine;
  }
  static sluice_dtype dtype() { return GetParam().dtype; }
  Folder folder_;
};
INSTANTIATE_TEST_SUITE_P(Places, SpanTest,
                         ::testing::Values(Case{"memory", SLUICE_F32}, Case{"disk", SLUICE_BF16}), case_name);

// What goes on from the checkpoint has the same bits in one unit and in three.
TEST_P(SpanTest, ACheckpointHasTheWhole) {
  const EngineHandle spans = fresh(kSpans), whole = fresh(kWhole);
  const std::vector<float> values = trained(spans.get(), kSpans, dtype(), 2);
  char* path = nullptr;
  ASSERT_OK(sluice_engine_save(spans.get(), folder_.path("saved").c_str(), 0, &path));
  ASSERT_OK(sluice_engine_load(whole.get(), path));
  EXPECT_EQ(trained(whole.get(), kWhole, dtype(), 0), values);
  const std::vector<float> later = trained(whole.get(), kWhole, dtype(), 2);
  const EngineHandle again = fresh(kSpans);
  ASSERT_OK(sluice_engine_load(again.get(), path));
  EXPECT_EQ(trained(again.get(), kSpans, dtype(), 2), later);
  ASSERT_OK(sluice_engine_load_values(again.get(), (std::string(path) + "/model.safetensors").c_str()));
  EXPECT_EQ(trained(again.get(), kSpans, dtype(), 0), values);
  sluice_text_destroy(path);
}

TEST(SpansThatDoNotFit, AreRefused) {
  Folder folder;
  const auto refused = [&](const std::vector<Span>& spans, const char* problem) {
    engine_of(spans, nullptr, SLUICE_F32, folder.path(), SLUICE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(sluice_last_error()).find(problem), std::string::npos) << sluice_last_error();
    EXPECT_NE(std::string(sluice_last_error()).find("'table'"), std::string::npos) << sluice_last_error();
  };
  refused({{0, kGrain}}, "ends early");
  refused({{0, kGrain}, {kGrain, kGrain}}, "ends early");
  refused({{0, kGrain}, {kGrain, 0}}, "no elements");
  refused({{0, kGrain}, {kGrain, 2 * kGrain}}, "beyond the end of the parameter");
  refused({{0, kGrain}, {UINT64_MAX, 2}}, "beyond the end of the parameter");
  refused({{0, kGrain + 5}, {kGrain + 5, kGrain}}, "no multiple");
  refused({{kGrain, kGrain}, {0, kGrain}}, "must follow");
  refused({{0, kGrain}, {2 * kGrain, kGrain / 2}}, "must follow");
}

}  // namespace sluice_c_test::span_test
