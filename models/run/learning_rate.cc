#include "models/run/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/error.h"
#include "core/json.h"

namespace sluice::models {

LearningRate::Shape schedule_shape(const std::string& name) {
  if (name == "constant") return LearningRate::Shape::kConstant;
  if (name == "cosine") return LearningRate::Shape::kCosine;
  if (name == "linear") return LearningRate::Shape::kLinear;
  fail(ErrorCode::kInvalidArgument, "'{}' is not a schedule; use constant, cosine or linear", name);
}

double LearningRate::at(std::uint64_t step) const {
  if (step <= warmup) return peak * static_cast<double>(step) / static_cast<double>(warmup);
  if (shape == Shape::kConstant) return peak;
  const auto falling = static_cast<double>(std::max<std::uint64_t>(steps, warmup + 2) - warmup - 1);
  const double progress = std::min(1.0, static_cast<double>(step - warmup - 1) / falling);
  const double left =
      shape == Shape::kCosine ? 0.5 * (1 + std::cos(std::numbers::pi * progress)) : 1 - progress;
  return peak * (final_share + (1 - final_share) * left);
}

}  // namespace sluice::models
