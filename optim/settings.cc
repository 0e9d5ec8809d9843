#include "optim/settings.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace sluice::optim {

namespace {

// docs/optimizers.md lists the other changes that a new entry needs.
std::vector<Setting> make_table() {
  using enum Range;
  using enum Change;
  std::vector<Setting> table;
  const auto add = [&](std::string_view name, Range range, Change change, std::vector<SettingOwner> owners,
                       std::string_view help, std::string_view source,
                       std::vector<std::string> choices = {}) {
    table.push_back({name, range, change, std::move(owners), help, source, std::move(choices)});
  };
  add("momentum", kShare, kByStepButNotZero, {{"sgd", "momentum", 0.0}},
      "share of the sum of gradients that a step keeps; 0 means no momentum", "Polyak 1964");
  add("momentum", kShare, kByStep, {{"muon", "momentum", 0.95}},
      "share of the average of a matrix's gradients that a step keeps", "Jordan et al. 2024");
  add("nesterov", kSwitch, kNever, {{"sgd", "nesterov", false}, {"muon", "nesterov", true}},
      "look ahead by the momentum (Nesterov)", "Sutskever et al. 2013, section 2");
  add("muon_scale", kChoice, kNever, {{"muon", "adjust_lr_fn", "original", "match_rms_adamw"}},
      "how the size of a step follows a matrix's shape; adamw's learning rates fit match_rms_adamw",
      "Jordan et al. 2024; Liu et al. 2025, equation 4", {"original", "match_rms_adamw"});
  add("beta1", kShare, kByStep,
      {{"adamw", "betas[0]", 0.9}, {"adam", "betas[0]", 0.9}, {"muon", "adamw_betas[0]", 0.9}},
      "share of the average of gradients that a step keeps", "Kingma, Ba 2015, algorithm 1");
  add("beta1", kShare, kByStep, {{"lion", "betas[0]", 0.9}}, "share of the average in a step's direction",
      "Chen et al. 2023, algorithm 2");
  add("beta1", kShare, kByStepButNotZero, {{"adafactor", "beta1", 0.0}},
      "share of the average of updates that a step keeps; 0 means no momentum",
      "Shazeer, Stern 2018, algorithm 2");
  add("beta2", kShare, kByStep,
      {{"adamw", "betas[1]", 0.999, 0.95},
       {"adam", "betas[1]", 0.999, 0.95},
       {"muon", "adamw_betas[1]", 0.999, 0.95}},
      "share of the average of squared gradients that a step keeps", "Kingma, Ba 2015, algorithm 1");
  add("beta2", kShare, kByStep, {{"lion", "betas[1]", 0.99}},
      "share of the average of gradients that a step keeps", "Chen et al. 2023, algorithm 2");
  add("epsilon", kZeroOrMore, kByStep,
      {{"adamw", "eps", 1e-8}, {"adam", "eps", 1e-8}, {"muon", "adamw_eps", 1e-8}},
      "is added to the root by which an update is divided", "Kingma, Ba 2015, algorithm 1");
  add("epsilon", kAboveZero, kByStep, {{"adafactor", "eps[0]", 1e-30}}, "is added to squared gradients",
      "Shazeer, Stern 2018, algorithms 4, 5");
  add("epsilon2", kAboveZero, kNever, {{"adafactor", "eps[1]", 1e-3}},
      "least root mean square of a parameter by which its steps are scaled",
      "Shazeer, Stern 2018, section 8");
  add("clip_threshold", kAboveZero, kNever, {{"adafactor", "clip_threshold", 1.0}},
      "upper bound of an update's root mean square", "Shazeer, Stern 2018, section 6");
  add("relative_step", kSwitch, kNever, {{"adafactor", "relative_step", false}},
      "multiply the learning rate by min(0.01, 1 / sqrt(step))", "Shazeer, Stern 2018, section 8");
  add("scale_parameter", kSwitch, kNever, {{"adafactor", "scale_parameter", true}},
      "scale steps by the parameter's root mean square", "Shazeer, Stern 2018, section 8");
  return table;
}

std::string text_of(const Json& value) {
  if (value.is_string()) return fmt::format("'{}'", value.get<std::string>());
  return value.is_number() ? fmt::format("{}", value.get<double>()) : value.dump();
}

// The values of a Range. Each value is checked in f64, and in f32 as the optimizers' loops use it.
struct RangeRow {
  SettingType type;
  std::string_view text;
  bool (*has)(double value, float single);
};
// In the order of Range.
constexpr RangeRow kRanges[] = {
    {SettingType::kNumber, "at least 0 and below 1", [](double v, float) { return v >= 0 && v < 1; }},
    {SettingType::kNumber, "finite and above 0, also when rounded to 32 bits",
     [](double, float s) { return std::isfinite(s) && s > 0; }},
    {SettingType::kNumber, "finite and 0 or more, also when rounded to 32 bits",
     [](double v, float s) { return std::isfinite(s) && (s > 0 || v == 0); }},
    {SettingType::kSwitch, "true or false", [](double v, float) { return v == 0 || v == 1; }},
    {SettingType::kChoice, "", [](double, float) { return false; }}};

const RangeRow& row_of(Range range) { return kRanges[static_cast<std::size_t>(range)]; }

const Setting* find(std::string_view optimizer, std::string_view key) {
  const auto found = std::ranges::find_if(setting_table(), [&](const Setting& setting) {
    const SettingOwner* const owner = setting.owner(optimizer);
    return owner != nullptr && (setting.name == key || owner->python == key);
  });
  return found == setting_table().end() ? nullptr : &*found;
}

std::string names_of(const std::vector<const Setting*>& settings) {
  std::vector<std::string_view> names;
  for (const Setting* const setting : settings) names.push_back(setting->name);
  return names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "));
}

Json to_json(const Setting& setting, const SettingOwner& owner) {
  constexpr const char* kTypes[] = {"number", "switch", "choice"};
  return {{"name", setting.name},
          {"python", owner.python},
          {"type", kTypes[static_cast<std::size_t>(type_of(setting.range))]},
          {"range", setting.range_text()},
          {"default", owner.value},
          {"by_step", setting.change != Change::kNever},
          {"needs_array", setting.change == Change::kByStepButNotZero},
          {"help", setting.help},
          {"source", setting.source}};
}

}  // namespace

const std::vector<Setting>& setting_table() {
  static const std::vector<Setting> table = make_table();
  return table;
}

SettingType type_of(Range range) { return row_of(range).type; }

const SettingOwner* Setting::owner(std::string_view optimizer) const {
  const auto found = std::ranges::find(owners, optimizer, &SettingOwner::optimizer);
  return found == owners.end() ? nullptr : &*found;
}

std::string Setting::range_text() const {
  if (range == Range::kChoice) return fmt::format("one of {}", fmt::join(choices, ", "));
  return std::string(row_of(range).text);
}

Json Setting::checked(std::string_view optimizer, std::string_view key, const Json& value) const {
  const SettingType type = type_of(range);
  if (type == SettingType::kSwitch && value.is_boolean()) return value;
  if (type == SettingType::kChoice && value.is_string() &&
      std::ranges::find(choices, value.get<std::string>()) != choices.end())
    return value;
  if (value.is_number() && row_of(range).has(value.get<double>(), value.get<float>()))
    return type == SettingType::kSwitch ? Json(value.get<double>() == 1) : Json(value.get<double>());
  fail(ErrorCode::kInvalidArgument, "{}: {} is {}; it must be {}", optimizer, key, text_of(value),
       range_text());
}

std::vector<const Setting*> settings_of(std::string_view optimizer) {
  std::vector<const Setting*> all;
  for (const Setting& setting : setting_table())
    if (setting.owner(optimizer) != nullptr) all.push_back(&setting);
  return all;
}

Json setting_table_json() {
  Json all = Json::object();
  for (const Setting& setting : setting_table())
    for (const SettingOwner& owner : setting.owners)
      all[std::string(owner.optimizer)].push_back(to_json(setting, owner));
  return all;
}

Settings::Settings(std::string_view optimizer, const Json& given, Defaults defaults) : optimizer_(optimizer) {
  take(given);
  for (const Setting* const setting : settings_of(optimizer)) {
    const SettingOwner& owner = *setting->owner(optimizer);
    const Json& value = defaults == Defaults::kOwn ? owner.value : owner.in_training();
    values_.emplace(setting->name, value);  // has no effect where a value was given
  }
}

std::vector<Settings::Given> Settings::take(const Json& given) {
  std::vector<Given> taken;
  for (const auto& [key, value] : given.items()) {
    const Setting* const setting = find(optimizer_, key);
    if (setting == nullptr)
      fail(ErrorCode::kInvalidArgument, "{} is given, but {} has none; it has {}", key, optimizer_,
           names_of(settings_of(optimizer_)));
    if (std::ranges::find(taken, setting, &Given::setting) != taken.end())
      fail(ErrorCode::kInvalidArgument, "{}: {} is given twice; give it once", optimizer_, setting->name);
    values_[std::string(setting->name)] = setting->checked(optimizer_, key, value);
    taken.push_back({setting, key});
  }
  return taken;
}

const Json& Settings::at(std::string_view name) const {
  const auto found = values_.find(name);
  ensure(found != values_.end(), "{} was asked for '{}', but has no such setting", optimizer_, name);
  return *found;
}

std::shared_ptr<const Settings> Settings::for_step(const Json& given) const {
  Settings other = *this;
  for (const auto& [setting, key] : other.take(given)) {
    const Json &before = at(setting->name), &now = other.at(setting->name);
    if (setting->change == Change::kNever && now != before)
      fail(ErrorCode::kInvalidArgument, "{}: {} is {}, but the optimizer was made with {}; it cannot change",
           optimizer_, key, text_of(now), text_of(before));
    if (setting->change == Change::kByStepButNotZero && (now == 0.0) != (before == 0.0))
      fail(ErrorCode::kInvalidArgument,
           "{}: {} is {}, but the optimizer was made with {}; its array of state is made at the start or not "
           "at all, so it cannot become {} later",
           optimizer_, key, text_of(now), text_of(before), before == 0.0 ? "other than 0" : "0");
  }
  return std::make_shared<const Settings>(std::move(other));
}

}  // namespace sluice::optim
