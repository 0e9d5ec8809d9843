#include "engine/layout/section.h"

#include <gtest/gtest.h>

namespace sluice::engine {
namespace section_test {

// Five units, of which the first and the third have two parameters.
Layout model() {
  std::vector<UnitSpec> units;
  for (const int count : {2, 1, 2, 1, 1}) {
    UnitSpec& unit = units.emplace_back();
    unit.name = "u" + std::to_string(units.size());
    for (int i = 0; i < count; ++i)
      unit.parameters.push_back({.name = unit.name + "." + std::to_string(i), .shape = {8}});
  }
  return Layout(units);
}

TEST(SectionTest, TranslatesItsUnitsAndParameters) {
  const Layout layout = model();
  const std::vector<UnitRange> cut = {{0, 2}, {2, 4}, {4, 5}};
  const Section middle(layout, cut, 3, 1, false);
  EXPECT_EQ(middle.own(1), std::nullopt);
  EXPECT_EQ(middle.own(2), 0u);
  EXPECT_EQ(middle.own(3), 1u);
  EXPECT_EQ(middle.own(4), std::nullopt);
  EXPECT_EQ(middle.of_model(0), 3u);
  EXPECT_EQ(middle.of_model(2), 5u);
  for (UnitId unit = 0; unit < 5; ++unit) EXPECT_EQ(middle.owner(unit), unit < 2 ? 0 : unit < 4 ? 1 : 2);
}

// The copy is known by the numbers of what it is a copy of, and is no unit that the section saves.
TEST(SectionTest, HasACopyAsItsFirstUnit) {
  const Layout layout = model();
  const Section last(layout, {{0, 4}, {4, 5}}, 2, 1, true);
  EXPECT_EQ(last.own(0), std::nullopt);
  EXPECT_EQ(last.own(4), 1u);
  EXPECT_EQ(last.of_model(0), 0u);
  EXPECT_EQ(last.of_model(1), 1u);
  EXPECT_EQ(last.of_model(2), 6u);
}

// The first chunks of all sections follow each other, then come the second ones.
TEST(SectionTest, HasSeveralChunks) {
  const Layout layout = model();
  const std::vector<UnitRange> cut = {{0, 1}, {1, 3}, {3, 4}, {4, 5}};
  const Section first(layout, cut, 2, 0, false), last(layout, cut, 2, 1, true);
  std::size_t parameters_of_first = 0, parameters_of_last = layout.end_parameter(0);  // with the copy's
  UnitId units_of_first = 0, units_of_last = 1;
  for (UnitId unit = 0; unit < 5; ++unit) {
    const bool is_first = unit == 0 || unit == 3;
    EXPECT_EQ(first.owner(unit), is_first ? 0 : 1) << unit;
    EXPECT_EQ(first.own(unit), is_first ? std::optional(units_of_first++) : std::nullopt) << unit;
    EXPECT_EQ(last.own(unit), is_first ? std::nullopt : std::optional(units_of_last++)) << unit;
    for (ParameterId p = layout.first_parameter(unit); p < layout.end_parameter(unit); ++p) {
      std::size_t& own = is_first ? parameters_of_first : parameters_of_last;
      EXPECT_EQ((is_first ? first : last).of_model(static_cast<ParameterId>(own++)), p);
    }
  }
  EXPECT_ANY_THROW(first.of_model(static_cast<ParameterId>(parameters_of_first)));
}

TEST(SectionTest, IsOfACutOfTheWholeModel) {
  const Layout layout = model();
  for (const std::vector<UnitRange>& cut :
       {std::vector<UnitRange>{{0, 2}, {2, 4}}, {{0, 2}, {3, 5}}, {{0, 5}, {5, 5}}, {{1, 5}}})
    EXPECT_ANY_THROW(Section(layout, cut, static_cast<int>(cut.size()), 0, false));
  EXPECT_ANY_THROW(Section(layout, {{0, 5}}, 1, 1, false));
  EXPECT_ANY_THROW(Section(layout, {{0, 2}, {2, 4}, {4, 5}}, 2, 0, false));
}

}  // namespace section_test
}  // namespace sluice::engine
