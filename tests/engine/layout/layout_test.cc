#include "engine/layout/layout.h"

#include "testing.h"
#include "tests/thrown.h"

namespace sluice::engine::layout_test {

UnitSpec unit(const std::string& name, std::vector<ParameterSpec> parameters, Dtype type = Dtype::kF32) {
  return {name, std::move(parameters), true, type};
}

// A parameter of 2500 x 1024 elements over three units.
std::vector<UnitSpec> spans(const std::string& name) {
  std::vector<UnitSpec> units;
  for (std::size_t i = 0; i < 3; ++i) {
    ParameterSpec span{name, {2500, 1024}};
    span.span_first = i * kSpanGrain;
    span.span_elements = std::min(kSpanGrain, 2500 * 1024 - span.span_first);
    units.push_back(unit(name + "." + std::to_string(i), {span}));
  }
  return units;
}

std::vector<UnitSpec> random_units(std::mt19937& random) {
  std::vector<UnitSpec> units;
  for (std::size_t u = 0; u < 6; ++u) {
    UnitSpec spec = unit("unit" + std::to_string(u), {}, random() % 2 == 0 ? Dtype::kF32 : Dtype::kBf16);
    for (std::size_t p = 0; p <= random() % 5; ++p)
      spec.parameters.push_back(
          {spec.name + "." + std::to_string(p), {1 + random() % 90, 1 + random() % 90}});
    units.push_back(spec);
  }
  return units;
}

TEST(Layout, ParametersLieOneAfterAnotherAndEachBeginsAligned) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    const std::vector<UnitSpec> units = random_units(random);
    const Layout layout(units);
    ParameterId next = 0;
    for (UnitId u = 0; u < units.size(); ++u) {
      std::size_t end = 0;  // the end of the parameter before
      EXPECT_EQ(layout.first_parameter(u), next);
      for (const ParameterSpec& spec : units[u].parameters) {
        const Layout::Location& location = layout.location(next);
        EXPECT_EQ(location.unit, u);
        EXPECT_EQ(location.offset % 1024, 0u);
        EXPECT_GE(location.offset, end);
        EXPECT_LT(location.offset - end, 1024u);
        EXPECT_EQ(location.elements, spec.shape[0] * spec.shape[1]);
        EXPECT_EQ(layout.spec(next).name, spec.name);
        EXPECT_EQ(layout.logical_index(next), next);
        EXPECT_EQ(layout.first_span(next), next);
        end = location.offset + location.elements;
        ++next;
      }
      EXPECT_EQ(layout.end_parameter(u), next);
      EXPECT_EQ(layout.unit_elements(u) % 4096, 0u);
      EXPECT_GE(layout.unit_elements(u), end);
      EXPECT_LT(layout.unit_elements(u), end + 1024 + 4096);
      EXPECT_EQ(layout.unit_bytes(u), layout.unit_elements(u) * (units[u].dtype == Dtype::kF32 ? 4 : 2));
      EXPECT_EQ(layout.siblings(u), (UnitRange{u, u + 1}));
    }
    EXPECT_EQ(layout.parameters(), next);
  }
}

TEST(Layout, RefusesWhatIsNoLayout) {
  const auto expect_refused = [](std::vector<UnitSpec> units, const std::string& part) {
    expect_error(ErrorCode::kInvalidArgument, {part}, [&] { Layout{std::move(units)}; });
  };
  expect_refused({unit("u", {})}, "'u' has no parameters");
  expect_refused({unit("u", {{"a", {3, 0}}})}, "'a' has no elements");
  expect_refused({unit("u", {{"a", {3}}}), unit("v", {{"a", {3}}})}, "named 'a'");
  expect_refused({unit("u", {{"a", {std::size_t{1} << 40, 1 << 20}}})}, "more than");
  std::vector<UnitSpec> torn = spans("s");
  torn.pop_back();
  expect_refused(torn, "no other span follows");
  torn = spans("s");
  torn.erase(torn.begin() + 1);
  expect_refused(torn, "must follow the span that ends there");
}

}  // namespace sluice::engine::layout_test
