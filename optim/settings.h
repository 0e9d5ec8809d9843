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

// The allowed values of a setting.
enum class Range { kShare, kAboveZero, kZeroOrMore, kSwitch, kChoice };
SettingType type_of(Range range);

// Whether a step may change the value.
enum class Change {
  kNever,
  kByStep,
  kByStepButNotZero,  // but not from or to 0, since with 0 a state array does not exist
};

// One optimizer that has the setting.
struct SettingOwner {
  std::string_view optimizer;
  // The keyword in torch.optim; "betas[0]" is the first of a pair.
  std::string_view python;
  Json value;         // the default
  Json trained = {};  // the default in training of native models, or null where it is the same
  const Json& in_training() const { return trained.is_null() ? value : trained; }
};

// An entry of the table. Settings with one name but several meanings are several entries.
struct Setting {
  std::string_view name;
  Range range;
  Change change;
  std::vector<SettingOwner> owners;
  std::string_view help;
  std::string_view source;
  std::vector<std::string> choices = {};

  const SettingOwner* owner(std::string_view optimizer) const;  // null where it lacks the setting
  std::string range_text() const;                               // "at least 0 and below 1"
  // Returns the value in the form in which Settings stores it. Throws Error(kInvalidArgument) for a value out
  // of range; its text calls the setting `key`, as the caller does.
  Json checked(std::string_view optimizer, std::string_view key, const Json& value) const;
};

const std::vector<Setting>& setting_table();
std::vector<const Setting*> settings_of(std::string_view optimizer);
// Returns the table by optimizer, for other languages: {"adamw": [{"name": "beta1", ...}, ...], ...}.
Json setting_table_json();

// The values of all settings of one optimizer, each within its range. Immutable; any thread.
class Settings {
 public:
  enum class Defaults { kOwn, kTraining };
  // `given` maps names, or Python's names, to values; a switch may be 0 or 1. Throws Error(kInvalidArgument)
  // for an unknown setting, a value out of range, and a setting that is given twice.
  Settings(std::string_view optimizer, const Json& given, Defaults defaults = Defaults::kOwn);
  // Makes the empty settings of an optimizer that is not in the table.
  explicit Settings(std::string_view optimizer) : optimizer_(optimizer) {}

  const std::string& optimizer() const { return optimizer_; }
  // REQUIRES: the optimizer has a setting of that name and type.
  double number(std::string_view name) const { return at(name).get<double>(); }
  bool is_on(std::string_view name) const { return at(name).get<bool>(); }
  const std::string& choice(std::string_view name) const { return at(name).get_ref<const std::string&>(); }
  const Json& to_json() const { return values_; }
  // Returns these settings with other values for a step. Also throws for a setting that must not change.
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
