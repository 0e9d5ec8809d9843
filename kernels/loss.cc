#include "kernels/loss.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/simd.h"

#include "kernels/simd-inl.h"
#include "kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

// Without NaN the order of comparisons does not matter. With one, the sum of exponentials is NaN anyway.
HWY_INLINE float maximum(std::size_t n, const float* values) {
  constexpr std::size_t kVectors = 4, kStep = kVectors * kLanes;
  F32Vector largest[kVectors];
  HWY_UNROLL(4)
  for (std::size_t j = 0; j < kVectors; ++j) largest[j] = set(-std::numeric_limits<float>::infinity());
  std::size_t i = 0;
  for (; i + kStep <= n; i += kStep) {
    HWY_UNROLL(4)
    for (std::size_t j = 0; j < kVectors; ++j)
      largest[j] = hn::Max(largest[j], hn::LoadU(F32(), values + i + j * kLanes));
  }
  float lanes[kStep];
  HWY_UNROLL(4)
  for (std::size_t j = 0; j < kVectors; ++j) hn::StoreU(largest[j], F32(), lanes + j * kLanes);
  float result = lanes[0];
  for (std::size_t j = 1; j < kStep; ++j) result = lanes[j] > result ? lanes[j] : result;
  for (; i < n; ++i) result = values[i] > result ? values[i] : result;
  return result;
}

// Returns the sum of exp(value - shift). With `keep` the exponentials replace the values.
HWY_INLINE float sum_exponentials(std::size_t n, float shift, float* values, bool keep) {
  return sum_in_lanes<float>(n, [=](auto at, auto sum) HWY_ATTR {
    const auto exponential = exp(hn::Sub(load(values, at), set(shift)));
    if (keep) store(exponential, values, at);
    return hn::Add(sum, exponential);
  });
}

float cross_entropy_row(std::size_t classes, std::int32_t target, float* logits, bool gradient,
                        float gradient_scale) {
  const float largest = maximum(classes, logits);
  const float target_logit = logits[target];
  const float sum = sum_exponentials(classes, largest, logits, gradient);
  if (gradient) {
    const float target_gradient = (logits[target] / sum - 1.0f) * gradient_scale;
    const float factor = gradient_scale / sum;
    for_each_vector(classes,
                    [=](auto at) HWY_ATTR { store(hn::Mul(load(logits, at), set(factor)), logits, at); });
    logits[target] = target_gradient;
  }
  // The largest exponential is 1, so a sum that is not at least 1 is NaN, from a logit that is not finite.
  return sum >= 1.0f ? (largest - target_logit) + hn::GetLane(log(set(sum))) : sum;
}

// Returns the largest logit and the sum of the exponentials, which replace the logits if `keep` is set.
RowStatistics row_statistics(std::size_t classes, float* logits, bool keep) {
  const float largest = maximum(classes, logits);
  return {largest, sum_exponentials(classes, largest, logits, keep), 0};
}

void scale_row(std::size_t n, float factor, float* values) {
  for_each_vector(n, [=](auto at) HWY_ATTR { store(hn::Mul(load(values, at), set(factor)), values, at); });
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::kernels {
HWY_EXPORT(cross_entropy_row);
HWY_EXPORT(row_statistics);
HWY_EXPORT(scale_row);

namespace {
void check_targets(std::size_t classes, std::span<const std::int32_t> targets) {
  for (std::size_t row = 0; row < targets.size(); ++row) {
    const std::int32_t target = targets[row];
    if (target != kIgnoredTarget && (target < 0 || static_cast<std::size_t>(target) >= classes))
      fail(ErrorCode::kInvalidArgument,
           "the target of row {} is {}, outside of the {} classes; use a smaller token, or {} for a row "
           "without a loss",
           row, target, classes, kIgnoredTarget);
  }
}

std::size_t rows_at_once(std::size_t classes) {
  return std::max<std::size_t>(kLoopGrain / 2 / std::max<std::size_t>(classes, 1), 1);
}

bool is_within(std::int32_t target, std::size_t first, std::size_t classes) {
  return target != kIgnoredTarget && static_cast<std::size_t>(target) >= first &&
         static_cast<std::size_t>(target) < first + classes;
}
}  // namespace

void cross_entropy(Threads& threads, std::size_t classes, std::span<const std::int32_t> targets,
                   float* logits, bool gradient, float gradient_scale, float* losses) {
  check_targets(classes, targets);
  threads.parallel_for(targets.size(), rows_at_once(classes), [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) {
      float* const values = logits + row * classes;
      losses[row] = 0;
      if (targets[row] != kIgnoredTarget)
        losses[row] =
            HWY_DYNAMIC_DISPATCH(cross_entropy_row)(classes, targets[row], values, gradient, gradient_scale);
      else if (gradient)
        std::fill_n(values, classes, 0.0f);
    }
  });
}

void cross_entropy_statistics(Threads& threads, std::size_t first, std::size_t classes,
                              std::span<const std::int32_t> targets, float* logits, bool keep,
                              RowStatistics* statistics) {
  threads.parallel_for(targets.size(), rows_at_once(classes), [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) {
      float* const values = logits + row * classes;
      const bool is_here = is_within(targets[row], first, classes);
      const float logit = is_here ? values[static_cast<std::size_t>(targets[row]) - first] : 0;
      statistics[row] = HWY_DYNAMIC_DISPATCH(row_statistics)(classes, values, keep);
      statistics[row].target_logit = logit;
    }
  });
}

void combine_statistics(std::size_t pieces, std::span<const std::int32_t> targets,
                        const RowStatistics* statistics, std::size_t piece, std::size_t of, float* factors,
                        float* losses) {
  const std::size_t rows = targets.size();
  for (std::size_t row = 0; row < rows; ++row) {
    const auto own = [&](std::size_t i) -> const RowStatistics& { return statistics[i * rows + row]; };
    float largest = own(0).largest, sum = 0, target_logit = 0;
    for (std::size_t i = 1; i < pieces; ++i) largest = std::max(largest, own(i).largest);
    for (std::size_t i = 0; i < pieces; ++i) {
      sum += own(i).sum * std::exp(own(i).largest - largest);
      target_logit += own(i).target_logit;
    }
    // As in cross_entropy(): the largest exponential is 1.
    losses[row] = targets[row] == kIgnoredTarget ? 0
                  : sum >= 1.0f                  ? (largest - target_logit) + std::log(sum)
                                                 : std::numeric_limits<float>::quiet_NaN();
    if (factors == nullptr) continue;
    for (std::size_t i = 0; i < of; ++i)
      factors[i * rows + row] = std::exp(own(piece + i).largest - largest) / sum;
  }
}

void cross_entropy_gradient(Threads& threads, std::size_t first, std::size_t classes,
                            std::span<const std::int32_t> targets, const float* factors, float gradient_scale,
                            float* exponentials) {
  threads.parallel_for(targets.size(), rows_at_once(classes), [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) {
      float* const values = exponentials + row * classes;
      if (targets[row] == kIgnoredTarget) {
        std::fill_n(values, classes, 0.0f);
        continue;
      }
      const std::size_t at = static_cast<std::size_t>(targets[row]) - first;
      const bool is_here = is_within(targets[row], first, classes);
      const float of_target = is_here ? (values[at] * factors[row] - 1.0f) * gradient_scale : 0;
      HWY_DYNAMIC_DISPATCH(scale_row)(classes, factors[row] * gradient_scale, values);
      if (is_here) values[at] = of_target;
    }
  });
}

double sum_in_order(std::span<const float> values) {
  double sum = 0;
  for (const float value : values) sum += value;
  return sum;
}

}  // namespace sluice::kernels
#endif  // HWY_ONCE
