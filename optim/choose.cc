#include <fmt/ranges.h>

#include <algorithm>

#include "core/error.h"
#include "optim/optimizer.h"

namespace sluice::optim {
namespace {

// An optimizer, and which of the settings it has.
struct Choice {
  const char* name;
  bool betas, epsilon, momentum;
  std::unique_ptr<Optimizer> (*make)(const OptimizerSettings&);
};

AdamSettings adam_settings(const OptimizerSettings& s) {
  const AdamSettings own;
  return {s.beta1.value_or(own.beta1), s.beta2.value_or(own.beta2), s.epsilon.value_or(own.epsilon),
          s.storage};
}

constexpr Choice kChoices[] = {
    {"adamw", true, true, false, [](const auto& s) { return make_adamw(adam_settings(s)); }},
    {"adam", true, true, false, [](const auto& s) { return make_adam(adam_settings(s)); }},
    {"lion", true, false, false,
     [](const auto& s) {
       const LionSettings own;
       return make_lion({s.beta1.value_or(own.beta1), s.beta2.value_or(own.beta2), s.storage});
     }},
    {"sgd", false, false, true,
     [](const auto& s) {
       return make_sgd({s.momentum.value_or(0), s.nesterov, s.storage});
     }},
};

void refuse_unknown(const OptimizerSettings& s, const Choice& choice) {
  const auto refuse = [&](bool given, bool known, const char* what) {
    if (!given || known) return;
    fail(ErrorCode::kInvalidArgument, "{} is given, and {} has none; it has {}", what, s.name,
         choice.momentum  ? "momentum and nesterov"
         : choice.epsilon ? "beta1, beta2 and epsilon"
                          : "beta1 and beta2");
  };
  refuse(s.beta1.has_value(), choice.betas, "beta1");
  refuse(s.beta2.has_value(), choice.betas, "beta2");
  refuse(s.epsilon.has_value(), choice.epsilon, "epsilon");
  refuse(s.momentum.has_value(), choice.momentum, "momentum");
  refuse(s.nesterov, choice.momentum, "nesterov");
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
  for (const Choice& choice : kChoices) names.emplace_back(choice.name);
  return names;
}

std::unique_ptr<Optimizer> make_optimizer(const OptimizerSettings& settings) {
  const auto* const found = std::find_if(std::begin(kChoices), std::end(kChoices),
                                         [&](const Choice& choice) { return choice.name == settings.name; });
  if (found == std::end(kChoices))
    fail(ErrorCode::kInvalidArgument, "there is no optimizer '{}'; there are {}", settings.name,
         fmt::join(optimizer_names(), ", "));
  refuse_unknown(settings, *found);
  return found->make(settings);
}

}  // namespace sluice::optim
