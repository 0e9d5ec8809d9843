#include "tests/bindings/c/support.h"

// Tests which spans of a parameter fit together. tests/engine/spans_test.cc compares them with one unit.
namespace sluice_c_test::span_test {

constexpr uint64_t kGrain = SLUICE_SPAN_GRAIN;
constexpr std::array<uint64_t, 2> kShape = {5, kGrain / 2};  // has 2.5 grains

struct Span {
  uint64_t first, elements;
};

TEST(SpansThatDoNotFit, AreRefused) {
  const auto refused = [&](const std::vector<Span>& spans, const char* problem) {
    const ModelHandle model =
        model_of(static_cast<uint32_t>(spans.size()), [&](uint32_t unit, sluice_parameter& given) {
          given.name = "table";
          given.shape = kShape.data();
          given.dimensions = kShape.size();
          given.span_first = spans[unit].first;
          given.span_elements = spans[unit].elements;
        });
    const sluice_engine_options options = options_of({}, nullptr);
    sluice_engine* engine = nullptr;
    expect_error(sluice_engine_create(model.get(), &options, &engine), SLUICE_INVALID_ARGUMENT,
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
