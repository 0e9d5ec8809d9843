#pragma once
#include <cstddef>
#include <span>

#include "core/dtype.h"
#include "core/threads.h"
#include "kernels/grid.h"
#include "kernels/partial_sum.h"

namespace sluice::kernels {

// Sum of squares in f64 and whether every value is finite, in one pass, of n elements of a parameter from
// `first` on. In a block lane j (of 16) adds elements j, j + 16, ... in order, and the lanes are added
// pairwise. Any f32, bf16 or f16 array. REQUIRES: first is a multiple of kGridBlock; so is n, but where the
// parameter ends.
struct SquareSum {
  PartialSum sum;
  bool finite = true;
};
SquareSum sum_of_squares(Threads& threads, std::size_t first, std::size_t n, ConstArray x);
// The same, of nodes that follow each other, which a GPU computed (device_reduce.h).
SquareSum square_sum(std::size_t first, std::span<const PartialSum::Node> nodes);
// to = x, or to += x, and the sum of squares of what `to` then holds: one pass over memory.
SquareSum store_summing_squares(Threads& threads, std::size_t first, std::size_t n, ConstArray x,
                                bool accumulate, float* to);

// out[j] (+)= sum over rows of x[i, j], in f32: blocks of 64 rows, each added in order, the blocks pairwise.
// workspace: column_sum_workspace bytes.
std::size_t column_sum_workspace(std::size_t rows, std::size_t width);
void column_sum(Threads& threads, std::size_t rows, std::size_t width, ConstArray x, float* out,
                bool accumulate, void* workspace);

}  // namespace sluice::kernels
