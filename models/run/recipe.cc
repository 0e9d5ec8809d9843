#include "models/run/recipe.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "core/error.h"

namespace sluice::models {
namespace {

struct Point {
  double block_parameters, rate;
};
// The first two are of Kaplan et al. 2020, equation D.1 (nanoGPT has the second, too), the others of Brown et
// al. 2020, table 2.1, whose models have 12 layers width^2 parameters in their blocks.
constexpr std::array<Point, 10> kAdamwRates = {{{0.8e6, 1.3e-3},
                                                {10.6e6, 1e-3},
                                                {84.9e6, 6e-4},
                                                {302e6, 3e-4},
                                                {679e6, 2.5e-4},
                                                {1.21e9, 2e-4},
                                                {2.52e9, 1.6e-4},
                                                {6.44e9, 1.2e-4},
                                                {12.7e9, 1e-4},
                                                {174e9, 0.6e-4}}};

// Rounds a value, so that the printed value is the one used.
double two_digits(double value) { return std::stod(fmt::format("{:.1e}", value)); }

double adamw_rate(double block_parameters) {
  const auto above = std::ranges::find_if(
      kAdamwRates, [&](const Point& point) { return point.block_parameters >= block_parameters; });
  if (above == kAdamwRates.begin()) return above->rate;
  if (above == kAdamwRates.end()) return kAdamwRates.back().rate;
  const Point& a = *(above - 1);
  const double along = std::log(block_parameters / a.block_parameters) /
                       std::log(above->block_parameters / a.block_parameters);
  return a.rate * std::pow(above->rate / a.rate, along);
}

optim::Settings settings_of(const optim::OptimizerSettings& given) {
  return {given.name, given.settings, optim::Settings::Defaults::kTraining};
}

struct Rates {
  double learning_rate;
  std::optional<double> adamw;  // for parameters that Muon leaves to AdamW, where it differs
  double weight_decay;
};

// Returns the rates for training from scratch.
Rates default_rates(const optim::Settings& settings, double block_parameters) {
  const double adamw = adamw_rate(block_parameters);
  const std::string& name = settings.optimizer();
  if (name == "adam") return {adamw, {}, 0};
  if (name == "lion") return {adamw / 3, {}, 0.3};
  if (name == "sgd") return {0.5 * (1 - settings.number("momentum")), {}, 0};
  if (name == "adafactor") {
    if (settings.is_on("relative_step")) return {1, {}, 0};
    return {settings.is_on("scale_parameter") ? 1e-2 : adamw, {}, 0};
  }
  if (name == "muon" && settings.choice("muon_scale") == "original") return {0.02, adamw, 0.01};
  return {adamw, {}, 0.1};  // adamw, and muon by its scale
}

constexpr double kFineTuning = 0.1;
constexpr std::uint64_t kLeastWarmup = 40, kMostWarmup = 2000;

// Takes each setting of a recipe from the first source that has it.
class Sources {
 public:
  Sources(const Json* record, const std::string& source, std::vector<std::string>& defaults)
      : source_(source), defaults_(defaults) {
    if (record == nullptr) return;
    values_ = json_field<Json>(*record, "hyperparameters", source);
    recorded_defaults_ = json_field<std::vector<std::string>>(*record, "defaults", source);
  }

  template <class T>
  T of(const char* name, const std::optional<T>& stated, const T& otherwise) {
    if (stated) return *stated;
    if (values_) {
      if (std::ranges::find(recorded_defaults_, name) != recorded_defaults_.end()) defaults_.push_back(name);
      return json_field<T>(*values_, name, source_);
    }
    defaults_.push_back(name);
    return otherwise;
  }
  // For settings that not every recipe has.
  std::optional<double> of(const char* name, const std::optional<double>& stated,
                           const std::optional<double>& otherwise) {
    const bool none = values_ ? !values_->contains(name) : !otherwise;
    if (none && !stated) return std::nullopt;
    return of(name, stated, otherwise.value_or(0));
  }

 private:
  const std::string& source_;
  std::optional<Json> values_;
  std::vector<std::string> recorded_defaults_;
  std::vector<std::string>& defaults_;
};

std::string rate_text(const Recipe& recipe, const optim::Settings& settings) {
  std::string text = fmt::format("{:g}", recipe.learning_rate);
  const bool adafactor = settings.optimizer() == "adafactor";
  if (adafactor && settings.is_on("relative_step")) text += " x min(0.01, 1 / sqrt(step))";
  if (adafactor && settings.is_on("scale_parameter")) text += " x each parameter's root mean square";
  if (recipe.adamw_learning_rate) text += fmt::format(" ({:g} of adamw's)", *recipe.adamw_learning_rate);
  return text;
}

std::string schedule_text(const Recipe& recipe, std::uint64_t steps) {
  const std::string warmup =
      recipe.warmup == 0 ? "no warm-up" : fmt::format("a warm-up of {} steps", recipe.warmup);
  if (recipe.warmup >= steps) return warmup + ", in which this run ends";
  if (recipe.schedule == "constant") return warmup + ", then constant";
  return fmt::format("{}, then {} to {:g} of it at step {}", warmup, recipe.schedule,
                     recipe.final_learning_rate, steps);
}

}  // namespace

Recipe make_recipe(const TrainSettings& s, const RecipeBasis& basis, const Json* record,
                   const std::string& source) {
  Rates rates = default_rates(settings_of(s.optimizer), basis.block_parameters);
  const double share = basis.first_values ? 1 : kFineTuning;
  rates.learning_rate = two_digits(rates.learning_rate * share);
  if (rates.adamw) rates.adamw = two_digits(*rates.adamw * share);
  if (s.learning_rate == 0.0) rates.adamw.reset();

  Recipe recipe;
  Sources sources(record, source, recipe.defaults);
  recipe.learning_rate = sources.of("lr", s.learning_rate, rates.learning_rate);
  recipe.adamw_learning_rate = sources.of("adamw-lr", s.adamw_learning_rate, rates.adamw);
  recipe.warmup = sources.of("warmup", s.warmup, std::clamp(s.steps / 10, kLeastWarmup, kMostWarmup));
  recipe.schedule = sources.of("schedule", s.schedule, std::string("cosine"));
  recipe.final_learning_rate = sources.of("final-lr", s.final_learning_rate, 0.1);
  recipe.clip = sources.of("clip", s.clip, 1.0);
  recipe.weight_decay = sources.of("weight-decay", s.weight_decay, rates.weight_decay);
  if (recipe.learning_rate == 0 && recipe.adamw_learning_rate.value_or(0) > 0)
    fail(ErrorCode::kInvalidArgument,
         "adamw-lr is {}, and its schedule is that of lr, which is 0; give a larger lr",
         *recipe.adamw_learning_rate);
  return recipe;
}

Json to_json(const Recipe& recipe) {
  Json json = {{"lr", recipe.learning_rate},  {"warmup", recipe.warmup},
               {"schedule", recipe.schedule}, {"final-lr", recipe.final_learning_rate},
               {"clip", recipe.clip},         {"weight-decay", recipe.weight_decay}};
  if (recipe.adamw_learning_rate) json["adamw-lr"] = *recipe.adamw_learning_rate;
  return json;
}

std::string to_text(const Recipe& recipe, const TrainSettings& s, const RecipeBasis& basis) {
  std::string text =
      fmt::format("learning rate     {} of {}, {}\n", rate_text(recipe, settings_of(s.optimizer)),
                  s.optimizer.name, schedule_text(recipe, s.steps));
  text += fmt::format("weight decay      {:g}; gradients clipped to {}\n", recipe.weight_decay,
                      recipe.clip == 0 ? "no norm" : fmt::format("a norm of {:g}", recipe.clip));
  if (recipe.defaults.empty()) return text;
  return text + fmt::format(
                    "defaults          {}: for {}, {:.3g} million parameters in blocks, {} "
                    "(docs/optimizers.md)\n",
                    fmt::join(recipe.defaults, ", "), s.optimizer.name, basis.block_parameters / 1e6,
                    basis.first_values ? "from first values" : "from weights");
}

}  // namespace sluice::models
