#include "tests/bindings/c/support.h"

// Tests which spans of a parameter fit together. tests/engine/spans_test.cc compares them with one unit.
namespace sluice_c_test::span_test {

constexpr uint64_t kGrain = SLUICE_SPAN_GRAIN;
constexpr std::array<uint64_t, 2> kShape = {5, kGrain / 2};  // has 2.5 grains

struct Span {
  uint64_t first, elements;
};

ModelHandle model_of(const std::vector<Span>& spans) {
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
    EXPECT_OK(sluice_model_add_parameter(model, &given, nullptr));
  }
  return {model, sluice_model_destroy};
}

TEST(SpansThatDoNotFit, AreRefused) {
  const auto refused = [&](const std::vector<Span>& spans, const char* problem) {
    const sluice_engine_options options = options_of({}, nullptr);
    sluice_engine* engine = nullptr;
    expect_error(sluice_engine_create(model_of(spans).get(), &options, &engine), SLUICE_INVALID_ARGUMENT,
                 {problem, "'table'"});
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
