#pragma once
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/json.h"

// What may be set of an optimizer: one table, which the bindings read, too.
namespace sluice::optim {

enum class SettingType { kNumber, kWhole, kSwitch, kChoice };

// Which values a setting has.
enum class Range { kShare, kAboveZero, kZeroOrMore, kFromOne, kSwitch, kChoice };
SettingType type_of(Range range);

// Whether another value may come with a step.
enum class Change {
  kNever,
  kByStep,
  kByStepButNotZero,  // nor from 0: with 0 the optimizer is made without the array of state that it needs
};

// An optimizer that has the setting.
struct SettingOwner {
  std::string_view optimizer;
  // What Python's users know it by from torch.optim; "betas[0]": the first of a pair.
  std::string_view python;
  Json value;         // where none is given
  Json trained = {};  // likewise in training of native models; null: the same
  const Json& in_training() const { return trained.is_null() ? value : trained; }
};

// One entry of the table. Settings of one name that mean different things are several entries.
struct Setting {
  std::string_view name;
  Range range;
  Change change;
  std::vector<SettingOwner> owners;
  std::string_view help;
  std::string_view source;
  std::vector<std::string> choices = {};

  const SettingOwner* owner(std::string_view optimizer) const;  // null: it has no such setting
  std::string range_text() const;                               // "at least 0 and below 1"
  // As it is kept. key: what the caller calls it. Throws Error(kInvalidArgument) for a value out of range.
  Json checked(std::string_view optimizer, std::string_view key, const Json& value) const;
};

const std::vector<Setting>& setting_table();
std::vector<const Setting*> settings_of(std::string_view optimizer);
// The table by optimizer, for those who do not speak C++: {"adamw": [{"name": "beta1", ...}, ...], ...}.
Json setting_table_json();

// The values of an optimizer's settings: every one that it has, each in its range. Thread rule: it does not
// change.
class Settings {
 public:
  enum class Defaults { kOwn, kTraining };
  // given: an object of values by name, which may be Python's; of a switch also 0 and 1. Throws
  // Error(kInvalidArgument) for what the optimizer does not have, what is out of range and what is given
  // twice.
  Settings(std::string_view optimizer, const Json& given, Defaults defaults = Defaults::kOwn);
  // Of an optimizer that is not in the table, and has none.
  explicit Settings(std::string_view optimizer) : optimizer_(optimizer) {}

  const std::string& optimizer() const { return optimizer_; }
  // REQUIRES: the optimizer has it.
  double number(std::string_view name) const { return at(name).get<double>(); }
  bool is_on(std::string_view name) const { return at(name).get<bool>(); }
  const std::string& choice(std::string_view name) const { return at(name).get_ref<const std::string&>(); }
  const Json& to_json() const { return values_; }
  // With other values for a step. Throws Error(kInvalidArgument) also for what cannot change.
  std::shared_ptr<const Settings> for_step(const Json& given) const;

 private:
  const Json& at(std::string_view name) const;
  struct Given {
    const Setting* setting;
    std::string key;  // as the caller has it
  };
  std::vector<Given> take(const Json& given);

  std::string optimizer_;
  Json values_ = Json::object();
};

}  // namespace sluice::optim
