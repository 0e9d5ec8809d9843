#pragma once
#include <cstddef>

#include "core/dtype.h"
#include "core/threads.h"

// Normalization of rows. x, y, dx and dy are [rows, width], of f32, bf16 or f16; gamma and beta are [width],
// of x's type; statistics are f32, an input of backward; dgamma and dbeta are f32, and are added to with
// accumulate, else overwritten. Sums are those of reduce.h: along a row in 16 lanes, over rows as
// column_sum().
namespace sluice::kernels {

// LayerNorm (Ba, Kiros, Hinton 2016). statistics: [rows, 2] = mean, 1 / sqrt(variance + epsilon).
void layernorm_forward(Threads& threads, std::size_t rows, std::size_t width, ConstArray x, ConstArray gamma,
                       ConstArray beta, float epsilon, Array y, float* statistics);
std::size_t norm_backward_workspace(std::size_t rows, std::size_t width);  // bytes, for both norms
void layernorm_backward(Threads& threads, std::size_t rows, std::size_t width, ConstArray x, ConstArray gamma,
                        const float* statistics, ConstArray dy, Array dx, float* dgamma, float* dbeta,
                        bool accumulate, void* workspace);

// RMSNorm (Zhang, Sennrich 2019). statistics: [rows] = 1 / sqrt(mean(x^2) + epsilon).
void rmsnorm_forward(Threads& threads, std::size_t rows, std::size_t width, ConstArray x, ConstArray gamma,
                     float epsilon, Array y, float* statistics);
void rmsnorm_backward(Threads& threads, std::size_t rows, std::size_t width, ConstArray x, ConstArray gamma,
                      const float* statistics, ConstArray dy, Array dx, float* dgamma, bool accumulate,
                      void* workspace);

}  // namespace sluice::kernels
