#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.h"
#include "core/threads.h"

namespace sluice::kernels {

inline constexpr std::int32_t kIgnoredTarget = -1;  // a row without a loss

// Softmax cross-entropy of a piece of rows: losses[r] = log(sum exp(logits[r])) - logits[r, target]; 0 for an
// ignored row. Where gradient, logits is overwritten with (softmax - onehot) * gradient_scale (0 for an
// ignored row). logits: [rows, classes] f32, row stride `classes`. Sums over a row use 16 lanes as in
// reduce.h.
void cross_entropy(Threads& threads, std::size_t classes, std::span<const std::int32_t> targets,
                   float* logits, bool gradient, float gradient_scale, float* losses);

// Sum of n f32 values in f64, in order.
double sum_in_order(std::span<const float> values);

}  // namespace sluice::kernels
