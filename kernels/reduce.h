#pragma once
#include <cstddef>
#include <span>

#include "core/dtype.h"
#include "core/threads.h"
#include "kernels/grid.h"
#include "kernels/partial_sum.h"

namespace sluice::kernels {

// Returns the sum of squares in f64 of n elements of a parameter, from `first` on, and whether all of them
// are finite. Within a block of the grid, lane j (of 16) adds elements j, j + 16, ... in order, and the lanes
// are added pairwise. x is f32, bf16 or f16. REQUIRES: first is a multiple of kGridBlock; so is n, unless the
// parameter ends there.
struct SquareSum {
  PartialSum sum;
  bool finite = true;
};
SquareSum sum_of_squares(Threads& threads, std::size_t first, std::size_t n, ConstArray x);
// The same from consecutive nodes that a GPU has computed (device_reduce.h).
SquareSum square_sum(std::size_t first, std::span<const PartialSum::Node> nodes);
// to = x, or to += x, and returns the sum of squares of the new `to`, in one pass over memory.
SquareSum store_summing_squares(Threads& threads, std::size_t first, std::size_t n, ConstArray x,
                                bool accumulate, float* to);

// out[j] (+)= sum over rows of x[i, j], in f32: blocks of 64 rows are added in order, and the blocks
// pairwise. workspace: column_sum_workspace() bytes.
std::size_t column_sum_workspace(std::size_t rows, std::size_t width);
void column_sum(Threads& threads, std::size_t rows, std::size_t width, ConstArray x, float* out,
                bool accumulate, void* workspace);

}  // namespace sluice::kernels
