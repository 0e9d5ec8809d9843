#pragma once
#include <cstdint>
#include <string>

#include "core/json.h"

namespace sluice::models {

// The factor of each step's loss that keeps gradients in f16 above the underflow at 2^-24; it is divided out
// when gradients are applied. It is fixed, or dynamic (Micikevicius et al. 2018, section 3.2, with the rule
// and numbers of torch.amp.GradScaler): a step whose gradients are not finite is skipped and halves it, and
// growth_interval applied steps in a row double it. Thread rule: one thread at a time.
class LossScale {
 public:
  static constexpr float kInitial = 65536, kGrowth = 2, kBackoff = 0.5f;
  static constexpr float kLeast = 1;  // gradients that overflow with this scale overflow without one
  static constexpr std::uint64_t kGrowthInterval = 2000;

  // Throws Error(kInvalidArgument) for a scale that is not finite or not above 0.
  static LossScale fixed(double scale);
  // Throws Error(kInvalidArgument) for a scale that is not finite or below kLeast, and for an interval of 0.
  static LossScale dynamic(double initial, std::uint64_t growth_interval);

  bool is_dynamic() const { return growth_interval_ > 0; }
  float value() const { return value_; }
  void applied();  // records that the step was applied
  // Records that the step was skipped, for the given reason. Throws Error(kNotFinite) with that reason where
  // the scale would fall below kLeast. REQUIRES: is_dynamic().
  void skipped(const std::string& reason);

  // Returns the state of a dynamic scale, for a checkpoint: {"scale", "applied", "skipped"}. "applied" counts
  // steps since the scale changed, "skipped" consecutive steps.
  Json state() const;
  // Throws Error(kInvalidArgument), with the source, for an invalid state.
  void restore(const Json& state, const std::string& source);
  bool operator==(const LossScale&) const = default;

 private:
  LossScale(float value, std::uint64_t growth_interval) : value_(value), growth_interval_(growth_interval) {}

  float value_;
  std::uint64_t growth_interval_;  // 0: fixed
  std::uint64_t applied_ = 0, skipped_ = 0;
};

}  // namespace sluice::models
