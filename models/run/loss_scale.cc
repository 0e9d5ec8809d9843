#include "models/run/loss_scale.h"

#include <cmath>

#include "core/error.h"

namespace sluice::models {

LossScale LossScale::fixed(double scale) {
  const auto value = static_cast<float>(scale);
  if (!std::isnormal(value) || !(value > 0))  // gradients are divided by it
    fail(ErrorCode::kInvalidArgument,
         "loss-scale must be dynamic, or a number above 0 that is finite and normal in 32 bits; {} was given",
         scale);
  return {value, 0};
}

LossScale LossScale::dynamic(double initial, std::uint64_t growth_interval) {
  const auto value = static_cast<float>(initial);
  if (!std::isfinite(value) || !(value >= kLeast))
    fail(ErrorCode::kInvalidArgument,
         "initial-scale must be a number of at least {} that is finite in 32 bits, {} was given", kLeast,
         initial);
  if (growth_interval == 0)
    fail(ErrorCode::kInvalidArgument, "scale-growth-interval must be at least 1 step, 0 was given");
  return {value, growth_interval};
}

void LossScale::applied() {
  skipped_ = 0;
  if (!is_dynamic() || ++applied_ < growth_interval_) return;
  applied_ = 0;
  if (const float grown = value_ * kGrowth; std::isfinite(grown)) value_ = grown;
}

void LossScale::skipped(const std::string& reason) {
  ensure(is_dynamic(), "a step was skipped with a fixed loss scale");
  ++skipped_;
  applied_ = 0;
  if (value_ * kBackoff < kLeast)
    fail(ErrorCode::kNotFinite,
         "the loss scale would fall below {}: the gradients of {} steps in a row were not finite, and no "
         "scale is to "
         "blame any more. In the last of them: {}",
         kLeast, skipped_, reason);
  value_ *= kBackoff;
}

Json LossScale::state() const { return {{"scale", value_}, {"applied", applied_}, {"skipped", skipped_}}; }

void LossScale::restore(const Json& state, const std::string& source) {
  value_ = json_field<float>(state, "scale", source);
  applied_ = json_field<std::uint64_t>(state, "applied", source);
  skipped_ = json_field<std::uint64_t>(state, "skipped", source);
  if (!std::isfinite(value_) || !(value_ >= kLeast))
    fail(ErrorCode::kInvalidArgument, "'{}' records a loss scale of {}; one is finite, and at least {}",
         source, value_, kLeast);
}

}  // namespace sluice::models
