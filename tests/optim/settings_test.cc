#include "optim/settings.h"

#include <fmt/ranges.h>

#include "core/text_file.h"
#include "optim/optimizer.h"
#include "source_folder.h"
#include "testing.h"
#include "thrown.h"

namespace sluice::optim::settings_test {

std::string value_text(const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  return value.is_number() ? fmt::format("{}", value.get<double>()) : value.dump();
}

// Writes a row of the table in docs/optimizers.md.
std::string row_of(const Setting& setting) {
  std::vector<std::string> owners;
  for (const SettingOwner& owner : setting.owners) {
    const std::string training =
        owner.trained.is_null() ? "" : fmt::format(" (in training {})", value_text(owner.trained));
    owners.push_back(
        fmt::format("`{}` {}{}: `{}`", owner.optimizer, value_text(owner.value), training, owner.python));
  }
  return fmt::format("| `{}` | {} | {} | {} | {} ({}) |", setting.name, fmt::join(owners, "; "),
                     setting.range_text(), setting.change == Change::kNever ? "" : "yes", setting.help,
                     setting.source);
}

TEST(SettingTable, MatchesTheDocument) {
  const std::string document = read_text_file(std::string(test::kSourceFolder) + "/docs/optimizers.md");
  std::string table;
  for (const Setting& setting : setting_table()) table += row_of(setting) + "\n";
  EXPECT_TRUE(document.find(table) != std::string::npos)
      << "docs/optimizers.md has another table of settings than optim/settings.cc; this is it:\n"
      << table;
}

TEST(SettingTable, HasEachSettingOfAnOptimizerOnceWithADefaultInItsRange) {
  const std::vector<std::string> optimizers = optimizer_names();
  for (const std::string& name : optimizers) {
    std::set<std::string_view> names;
    for (const Setting* const setting : settings_of(name)) {
      const SettingOwner& owner = *setting->owner(name);
      EXPECT_TRUE(names.insert(setting->name).second) << name << ": " << setting->name;
      EXPECT_TRUE(owner.python == setting->name || names.insert(owner.python).second) << owner.python;
      for (const Json& value : {owner.value, owner.in_training()})
        EXPECT_EQ(setting->checked(name, setting->name, value), value);
    }
  }
  for (const Setting& setting : setting_table())
    for (const SettingOwner& owner : setting.owners)
      EXPECT_THAT(optimizers, testing::Contains(std::string(owner.optimizer))) << setting.name;
}

TEST(SettingTable, IsGivenAsJson) {
  const Json all = setting_table_json();
  EXPECT_EQ(all.size(), optimizer_names().size());
  const Json& momentum = all.at("sgd").at(0);
  EXPECT_EQ(momentum.at("name"), "momentum");
  EXPECT_EQ(momentum.at("type"), "number");
  EXPECT_EQ(momentum.at("default"), 0.0);
  EXPECT_EQ(momentum.at("needs_array"), true);
  EXPECT_EQ(all.at("muon").at(2).at("python"), "adjust_lr_fn");
  EXPECT_EQ(all.at("muon").at(2).at("range"), "one of original, match_rms_adamw");
}

// Checks a setting of each range, for an optimizer that does not exist.
TEST(Setting, TakesValuesWithinItsRange) {
  const auto of = [](Range range) {
    return Setting{"x", range, Change::kNever, {{"own", "x", 1}}, "", "", {"a", "b"}};
  };
  const auto taken = [&](Range range, const Json& value) { return of(range).checked("own", "x", value); };
  const auto refused = [&](Range range, const Json& value, const std::vector<std::string>& parts) {
    expect_error(ErrorCode::kInvalidArgument, parts, [&] { taken(range, value); });
  };
  EXPECT_EQ(taken(Range::kShare, 0), 0.0);
  refused(Range::kShare, 1, {"own: x is 1; it must be at least 0 and below 1"});
  refused(Range::kShare, true, {"x is true"});
  refused(Range::kShare, std::nan(""), {"x is nan"});
  EXPECT_EQ(taken(Range::kZeroOrMore, 0), 0.0);
  refused(Range::kZeroOrMore, HUGE_VAL, {"x is inf", "finite"});
  refused(Range::kAboveZero, 0, {"above 0"});
  refused(Range::kAboveZero, 1e-60, {"x is 1e-60", "32 bits"});
  EXPECT_EQ(taken(Range::kSwitch, 1), true);
  EXPECT_EQ(taken(Range::kSwitch, false), false);
  refused(Range::kSwitch, 2, {"x is 2", "true or false"});
  EXPECT_EQ(taken(Range::kChoice, "b"), "b");
  refused(Range::kChoice, "c", {"x is 'c'", "one of a, b"});
  refused(Range::kChoice, 0, {"x is 0", "one of a, b"});
  refused(Range::kChoice, nullptr, {"x is null"});
}

TEST(Settings, HaveDefaultsAndPythonsNames) {
  const Settings own("adamw", {{"betas[0]", 0.5}});
  EXPECT_EQ(own.to_json(), (Json{{"beta1", 0.5}, {"beta2", 0.999}, {"epsilon", 1e-8}}));
  EXPECT_EQ(Settings("adamw", nullptr, Settings::Defaults::kTraining).number("beta2"), 0.95);
  EXPECT_EQ(Settings("adamw", {{"beta2", 0.5}}, Settings::Defaults::kTraining).number("beta2"), 0.5);
  const Settings muon("muon", {{"adjust_lr_fn", "match_rms_adamw"}});
  EXPECT_EQ(muon.choice("muon_scale"), "match_rms_adamw");
  EXPECT_TRUE(muon.is_on("nesterov"));
  expect_error(ErrorCode::kInvalidArgument, {"muon: adjust_lr_fn is 'large'"}, [] {
    Settings("muon", {{"adjust_lr_fn", "large"}});
  });
  expect_error(ErrorCode::kInvalidArgument, {"beta1 is given twice"}, [] {
    Settings("adam", {{"betas[0]", 0.5}, {"beta1", 0.5}});
  });
  EXPECT_THROW(own.number("momentum"), Error);
}

TEST(Settings, OfAStepKeepTheOtherValues) {
  const Settings own("adamw", {{"beta1", 0.5}});
  EXPECT_EQ(own.for_step({{"beta2", 0.7}})->to_json(),
            (Json{{"beta1", 0.5}, {"beta2", 0.7}, {"epsilon", 1e-8}}));
  EXPECT_EQ(Settings("sgd", nullptr).for_step({{"nesterov", false}})->is_on("nesterov"), false);
}

}  // namespace sluice::optim::settings_test
