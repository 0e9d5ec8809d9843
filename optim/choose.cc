#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "optim/optimizer.h"

namespace sluice::optim {
namespace {

constexpr MuonScale kMuonScales[] = {MuonScale::kOriginal, MuonScale::kMatchRmsAdamw};

// An optimizer, and which of the settings it has.
struct Choice {
  std::string_view name;
  std::vector<std::string_view> settings;
  std::unique_ptr<Optimizer> (*make)(const OptimizerSettings&);
};

AdamSettings adam_settings(const OptimizerSettings& s) {
  const AdamSettings own;
  return {s.beta1.value_or(own.beta1), s.beta2.value_or(own.beta2), s.epsilon.value_or(own.epsilon),
          s.storage};
}

AdafactorSettings adafactor_settings(const OptimizerSettings& s) {
  const AdafactorSettings own;
  return {.beta1 = s.beta1.value_or(own.beta1),
          .epsilon1 = s.epsilon.value_or(own.epsilon1),
          .epsilon2 = s.epsilon2.value_or(own.epsilon2),
          .clip_threshold = s.clip_threshold.value_or(own.clip_threshold),
          .relative_step = s.relative_step,
          .scale_parameter = s.scale_parameter.value_or(own.scale_parameter),
          .storage = s.storage};
}

MuonScale muon_scale_from_name(const std::string& name) {
  for (const MuonScale scale : kMuonScales)
    if (name_of(scale) == name) return scale;
  fail(ErrorCode::kInvalidArgument, "muon: there is no scale '{}'; there are {}", name,
       fmt::join(muon_scale_names(), ", "));
}

MuonSettings muon_settings(const OptimizerSettings& s) {
  const MuonSettings own;
  return {.momentum = s.momentum.value_or(own.momentum),
          .nesterov = s.nesterov.value_or(own.nesterov),
          .scale = s.muon_scale ? muon_scale_from_name(*s.muon_scale) : own.scale,
          .rest = adam_settings(s)};
}

const std::vector<Choice>& choices() {
  static const std::vector<Choice> all = {
      {"adamw", {"beta1", "beta2", "epsilon"}, [](const auto& s) { return make_adamw(adam_settings(s)); }},
      {"adam", {"beta1", "beta2", "epsilon"}, [](const auto& s) { return make_adam(adam_settings(s)); }},
      {"lion",
       {"beta1", "beta2"},
       [](const auto& s) {
         const LionSettings own;
         return make_lion({s.beta1.value_or(own.beta1), s.beta2.value_or(own.beta2), s.storage});
       }},
      {"sgd",
       {"momentum", "nesterov"},
       [](const auto& s) {
         return make_sgd({s.momentum.value_or(0), s.nesterov.value_or(false), s.storage});
       }},
      {"adafactor",
       {"beta1", "epsilon", "epsilon2", "clip_threshold", "relative_step", "scale_parameter"},
       [](const auto& s) { return make_adafactor(adafactor_settings(s)); }},
      {"muon",
       {"momentum", "nesterov", "muon_scale", "beta1", "beta2", "epsilon"},
       [](const auto& s) { return make_muon(muon_settings(s)); }},
  };
  return all;
}

bool has(const Choice& choice, std::string_view setting) {
  return std::find(choice.settings.begin(), choice.settings.end(), setting) != choice.settings.end();
}

const Choice* choice_of(std::string_view name) {
  const auto found = std::find_if(choices().begin(), choices().end(),
                                  [&](const Choice& choice) { return choice.name == name; });
  return found == choices().end() ? nullptr : &*found;
}

void refuse_unknown(const OptimizerSettings& s, const Choice& choice) {
  const std::pair<std::string_view, bool> given[] = {{"beta1", s.beta1.has_value()},
                                                     {"beta2", s.beta2.has_value()},
                                                     {"epsilon", s.epsilon.has_value()},
                                                     {"momentum", s.momentum.has_value()},
                                                     {"nesterov", s.nesterov.has_value()},
                                                     {"epsilon2", s.epsilon2.has_value()},
                                                     {"clip_threshold", s.clip_threshold.has_value()},
                                                     {"relative_step", s.relative_step},
                                                     {"scale_parameter", s.scale_parameter.has_value()},
                                                     {"muon_scale", s.muon_scale.has_value()}};
  for (const auto& [name, is_given] : given)
    if (is_given && !has(choice, name))
      fail(ErrorCode::kInvalidArgument, "{} is given, and {} has none; it has {}", name, s.name,
           fmt::join(choice.settings, ", "));
}

}  // namespace

std::string_view state_type_name(Dtype type) { return type == Dtype::kU8 ? "8bit" : name_of(type); }

std::string_view name_of(MuonScale scale) {
  return scale == MuonScale::kOriginal ? "original" : "match_rms_adamw";
}

std::vector<std::string> muon_scale_names() {
  std::vector<std::string> names;
  for (const MuonScale scale : kMuonScales) names.emplace_back(name_of(scale));
  return names;
}

std::vector<std::string> state_type_names() { return {"f32", "bf16", "8bit"}; }

std::optional<Dtype> state_type_from_name(std::string_view name) {
  for (const Dtype type : {Dtype::kF32, Dtype::kBf16, Dtype::kU8})
    if (state_type_name(type) == name) return type;
  return std::nullopt;
}

std::vector<std::string> optimizer_names() {
  std::vector<std::string> names;
  for (const Choice& choice : choices()) names.emplace_back(choice.name);
  return names;
}

void OptimizerSettings::set(const Coefficients& c) {
  const Choice* const choice = choice_of(name);
  if (choice == nullptr) return;  // make_optimizer() says so
  if (has(*choice, "beta1")) beta1 = c.beta1;
  if (has(*choice, "beta2")) beta2 = c.beta2;
  if (has(*choice, "epsilon")) epsilon = c.epsilon;
  if (has(*choice, "momentum")) momentum = c.momentum;
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerSettings& settings) {
  const Choice* const found = choice_of(settings.name);
  if (found == nullptr)
    fail(ErrorCode::kInvalidArgument, "there is no optimizer '{}'; there are {}", settings.name,
         fmt::join(optimizer_names(), ", "));
  refuse_unknown(settings, *found);
  return found->make(settings);
}

}  // namespace sluice::optim
