#pragma once
#include <cstddef>

#include "core/dtype.h"
#include "core/threads.h"

namespace sluice::kernels {

// Sum of squares in f64 and whether every value is finite, in one pass.
// Order: blocks of kSumBlock elements from the first one; in a block lane j (of 16) adds elements j, j + 16,
// ... in order; the 16 lanes, and then the blocks, are added pairwise (neighbours first, an odd last one
// carried). Any f32, bf16 or f16 array.
inline constexpr std::size_t kSumBlock = 4096;
struct SquareSum {
  double sum = 0;
  bool finite = true;
};
SquareSum sum_of_squares(Threads& threads, std::size_t n, ConstArray x);
// to = x, or to += x, and the sum of squares of what `to` then holds: one pass over memory.
SquareSum store_summing_squares(Threads& threads, std::size_t n, ConstArray x, bool accumulate, float* to);

// out[j] (+)= sum over rows of x[i, j], in f32: blocks of 64 rows, each added in order, the blocks pairwise.
// workspace: column_sum_workspace bytes.
std::size_t column_sum_workspace(std::size_t rows, std::size_t width);
void column_sum(Threads& threads, std::size_t rows, std::size_t width, ConstArray x, float* out,
                bool accumulate, void* workspace);

}  // namespace sluice::kernels
