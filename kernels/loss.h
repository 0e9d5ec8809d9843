#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.h"
#include "core/threads.h"

namespace sluice::kernels {

inline constexpr std::int32_t kIgnoredTarget = -1;  // a row without a loss

// Softmax cross-entropy of some rows: losses[r] = log(sum exp(logits[r])) - logits[r, target], or 0 for an
// ignored row. Where `gradient` is set, logits becomes (softmax - onehot) * gradient_scale, or 0 for an
// ignored row. logits is dense: [rows, classes] of f32. Sums over a row use 16 lanes as in reduce.h.
void cross_entropy(Threads& threads, std::size_t classes, std::span<const std::int32_t> targets,
                   float* logits, bool gradient, float gradient_scale, float* losses);

// Returns the sum of f32 values, added in f64 and in order.
double sum_in_order(std::span<const float> values);

}  // namespace sluice::kernels
