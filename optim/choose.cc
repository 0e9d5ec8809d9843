#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "optim/elementwise.h"

namespace sluice::optim {
namespace {

constexpr std::pair<std::string_view, Maker*> kMakers[] = {
    {"adamw", make_adamw}, {"adam", make_adam},           {"lion", make_lion},
    {"sgd", make_sgd},     {"adafactor", make_adafactor}, {"muon", make_muon}};

// Refuses a state type that none of the optimizer's arrays can have.
void check_storage(const Optimizer& optimizer) {
  const Dtype type = optimizer.storage().state;
  const std::vector<std::string> names = state_type_names();
  if (std::ranges::find(names, state_type_name(type)) == names.end())
    fail(ErrorCode::kInvalidArgument, "{}: state of type {} was asked for; the type may be {}",
         optimizer.name(), name_of(type), fmt::join(names, ", "));
  if (type == Dtype::kF32 || !optimizer.state().empty()) return;
  for (const Setting* const setting : settings_of(optimizer.name()))
    if (setting->change == Change::kByStepButNotZero)
      fail(ErrorCode::kInvalidArgument,
           "{}: state of type {} was asked for, but without momentum there is no array to have it; leave the "
           "type out, or give a {} above 0",
           optimizer.name(), state_type_name(type), setting->name);
  fail(ErrorCode::kInvalidArgument,
       "{}: state of type {} was asked for, but there is no array to have it; leave the type out",
       optimizer.name(), state_type_name(type));
}

}  // namespace

std::string_view state_type_name(Dtype type) { return type == Dtype::kU8 ? "8bit" : name_of(type); }

std::vector<std::string> state_type_names() { return {"f32", "bf16", "8bit"}; }

std::optional<Dtype> state_type_from_name(std::string_view name) {
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kU8})
    if (state_type_name(type) == name) return type;
  return std::nullopt;
}

std::vector<std::string> optimizer_names() {
  std::vector<std::string> names;
  for (const auto& [name, make] : kMakers) names.emplace_back(name);
  return names;
}

Optimizer::Optimizer(Settings settings, const Storage& storage)
    : settings_(std::move(settings)), storage_(storage) {}

Json Optimizer::settings() const {
  Json all = settings_.to_json();
  if (storage_.state != Dtype::kF32) all["state"] = state_type_name(storage_.state);
  if (!storage_.master) all["master"] = "none";
  return all;
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerSettings& given, Settings::Defaults defaults) {
  for (const auto& [name, make] : kMakers) {
    if (name != given.name) continue;
    auto made = make(Settings(name, given.settings, defaults), given.storage);
    check_storage(*made);
    return made;
  }
  fail(ErrorCode::kInvalidArgument, "there is no optimizer '{}'; choose one of {}", given.name,
       fmt::join(optimizer_names(), ", "));
}

}  // namespace sluice::optim
