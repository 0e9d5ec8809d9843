#pragma once
#include <cstdint>
#include <string>

#include "core/json.h"

namespace sluice::models {

// The factor of each step's loss, so that gradients in f16 do not vanish below 2^-24; they are divided by it
// again when they are applied. It is fixed, or dynamic (Micikevicius et al. 2018, section 3.2, by the rule
// and with the numbers of torch.amp.GradScaler): a step whose gradients are not finite is skipped and halves
// it, and growth_interval steps in a row that were applied double it. Thread rule: one thread at a time.
class LossScale {
 public:
  static constexpr float kInitial = 65536, kGrowth = 2, kBackoff = 0.5f;
  static constexpr float kLeast =
      1;  // gradients that are too large with this scale are too large without one
  static constexpr std::uint64_t kGrowthInterval = 2000;

  // Throws Error(kInvalidArgument) for a scale that is not finite or not above 0.
  static LossScale fixed(double scale);
  // Throws Error(kInvalidArgument) for one that is not finite or below kLeast, and for an interval of 0.
  static LossScale dynamic(double initial, std::uint64_t growth_interval);

  bool is_dynamic() const { return growth_interval_ > 0; }
  float value() const { return value_; }
  void applied();  // the step was applied
  // The step was skipped; `reason` says what was found. Throws Error(kNotFinite) with it where the scale
  // would fall below kLeast. REQUIRES: is_dynamic().
  void skipped(const std::string& reason);

  // The state of a dynamic scale, for a checkpoint: {"scale", "applied", "skipped"}. "applied" counts steps
  // since the scale changed, "skipped" steps in a row.
  Json state() const;
  // Throws Error(kInvalidArgument) that names the source for what is no such state.
  void restore(const Json& state, const std::string& source);
  bool operator==(const LossScale&) const = default;

 private:
  LossScale(float value, std::uint64_t growth_interval) : value_(value), growth_interval_(growth_interval) {}

  float value_;
  std::uint64_t growth_interval_;  // 0: fixed
  std::uint64_t applied_ = 0, skipped_ = 0;
};

}  // namespace sluice::models
