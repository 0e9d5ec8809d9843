#pragma once
#include <cstdint>
#include <string>

namespace sluice::models {

// The learning rate by step. It rises linearly over the first `warmup` steps and reaches its peak with the
// last of them. From then to step `steps` it stays constant, or falls to final_share of the peak, linearly or
// along a cosine.
struct LearningRate {
  double peak = 0;
  std::uint64_t warmup = 0, steps = 1;
  double final_share = 0;
  enum class Shape : std::uint8_t { kConstant, kCosine, kLinear } shape = Shape::kConstant;

  double at(std::uint64_t step) const;  // step counts from 1
};

// Parses "constant", "cosine" or "linear". Throws Error(kInvalidArgument) otherwise.
LearningRate::Shape schedule_shape(const std::string& name);

}  // namespace sluice::models
