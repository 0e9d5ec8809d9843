#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.h"
#include "core/threads.h"

namespace sluice::kernels {

inline constexpr std::int32_t kIgnoredTarget = -1;  // a row without a loss

// Softmax cross-entropy by row: losses[r] = log(sum exp(logits[r])) - logits[r, target], or 0 for an ignored
// row. With `gradient`, logits becomes (softmax - onehot) * gradient_scale, or 0 for an ignored row. logits
// is dense: [rows, classes] of f32. Sums over a row use 16 lanes as in reduce.h.
void cross_entropy(Threads& threads, std::size_t classes, std::span<const std::int32_t> targets,
                   float* logits, bool gradient, float gradient_scale, float* losses);

// The same where the classes are cut into pieces, in two halves, between which the ranks exchange the
// statistics of all pieces. Statistics of a row in a piece: the largest logit, the sum of exp(logit -
// largest), and the target's logit, or 0 where the target is in another piece.
struct RowStatistics {
  float largest = 0, sum = 0, target_logit = 0;
};
// Computes the statistics of a piece, which has the classes first ... first + classes - 1 of all, and logits
// [rows, classes]. With `keep`, exp(logit - largest) replaces the logits.
void cross_entropy_statistics(Threads& threads, std::size_t first, std::size_t classes,
                              std::span<const std::int32_t> targets, float* logits, bool keep,
                              RowStatistics* statistics);
// Combines statistics [pieces, rows], adding over pieces in their order. losses[r] are as in cross_entropy().
// factors, if not null, gets for each of `of` pieces from `piece` on, [of, rows], the factors that turn the
// row's exponentials into their softmax.
void combine_statistics(std::size_t pieces, std::span<const std::int32_t> targets,
                        const RowStatistics* statistics, std::size_t piece, std::size_t of, float* factors,
                        float* losses);
// Turns the exponentials that a piece has kept into its gradient: (softmax - onehot) * gradient_scale, or 0
// for an ignored row.
void cross_entropy_gradient(Threads& threads, std::size_t first, std::size_t classes,
                            std::span<const std::int32_t> targets, const float* factors, float gradient_scale,
                            float* exponentials);

// Returns the sum of f32 values, added in f64 and in order.
double sum_in_order(std::span<const float> values);

}  // namespace sluice::kernels
