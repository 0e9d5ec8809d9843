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
  const Section middle(layout, cut, 1, false);
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
  const Section last(layout, {{0, 4}, {4, 5}}, 1, true);
  EXPECT_EQ(last.own(0), std::nullopt);
  EXPECT_EQ(last.own(4), 1u);
  EXPECT_EQ(last.of_model(0), 0u);
  EXPECT_EQ(last.of_model(1), 1u);
  EXPECT_EQ(last.of_model(2), 6u);
}

TEST(SectionTest, IsOfACutOfTheWholeModel) {
  const Layout layout = model();
  for (const std::vector<UnitRange>& cut :
       {std::vector<UnitRange>{{0, 2}, {2, 4}}, {{0, 2}, {3, 5}}, {{0, 5}, {5, 5}}, {{1, 5}}})
    EXPECT_ANY_THROW(Section(layout, cut, 0, false));
  EXPECT_ANY_THROW(Section(layout, {{0, 5}}, 1, false));
}

}  // namespace section_test
}  // namespace sluice::engine
