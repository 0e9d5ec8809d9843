#pragma once
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"

// The settings of the optimizers: one table, which the bindings read, too.
namespace sluice::optim {

enum class SettingType { kNumber, kSwitch, kChoice };

// Which values a setting may have.
enum class Range { kShare, kAboveZero, kZeroOrMore, kSwitch, kChoice };
SettingType type_of(Range range);

// Whether a step may come with another value.
enum class Change {
  kNever,
  kByStep,
  kByStepButNotZero,  // may neither become 0 nor stop being 0, since with 0 an array of state is not made
};

// One optimizer that has the setting.
struct SettingOwner {
  std::string_view optimizer;
  // The key of torch.optim, which Python's users know; "betas[0]" is the first of a pair.
  std::string_view python;
  Json value;         // the default
  Json trained = {};  // the default in training of native models, or null where it is the same
  const Json& in_training() const { return trained.is_null() ? value : trained; }
};

// One entry of the table. Settings that share a name but mean different things are several entries.
struct Setting {
  std::string_view name;
  Range range;
  Change change;
  std::vector<SettingOwner> owners;
  std::string_view help;
  std::string_view source;
  std::vector<std::string> choices = {};

  const SettingOwner* owner(std::string_view optimizer) const;  // null where it has no such setting
  std::string range_text() const;                               // "at least 0 and below 1"
  // Returns the value in the form in which Settings keeps it. Throws Error(kInvalidArgument) for a value out
  // of range; its text calls the setting `key`, as the caller does.
  Json checked(std::string_view optimizer, std::string_view key, const Json& value) const;
};

const std::vector<Setting>& setting_table();
std::vector<const Setting*> settings_of(std::string_view optimizer);
// Returns the table by optimizer, for other languages: {"adamw": [{"name": "beta1", ...}, ...], ...}.
Json setting_table_json();

// The values of one optimizer's settings: every setting that it has, each within its range. Thread rule: it
// does not change after it is made.
class Settings {
 public:
  enum class Defaults { kOwn, kTraining };
  // `given` is an object of values by name, or by Python's name; a switch may be 0 or 1. Throws
  // Error(kInvalidArgument) for an unknown setting, a value out of range, and a setting that is given twice.
  Settings(std::string_view optimizer, const Json& given, Defaults defaults = Defaults::kOwn);
  // Makes the settings of an optimizer that is not in the table, which has none.
  explicit Settings(std::string_view optimizer) : optimizer_(optimizer) {}

  const std::string& optimizer() const { return optimizer_; }
  // REQUIRES: the optimizer has a setting of that name and type.
  double number(std::string_view name) const { return at(name).get<double>(); }
  bool is_on(std::string_view name) const { return at(name).get<bool>(); }
  const std::string& choice(std::string_view name) const { return at(name).get_ref<const std::string&>(); }
  const Json& to_json() const { return values_; }
  // Returns these settings with other values for a step. Throws also for a setting that may not change.
  std::shared_ptr<const Settings> for_step(const Json& given) const;

 private:
  const Json& at(std::string_view name) const;
  struct Given {
    const Setting* setting;
    std::string key;  // the name that the caller used
  };
  std::vector<Given> take(const Json& given);

  std::string optimizer_;
  Json values_ = Json::object();
};

}  // namespace sluice::optim
