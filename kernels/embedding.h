#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.h"
#include "core/threads.h"

namespace sluice::kernels {

// y[r] = table[tokens[r]] (+ positions[first_position + r % length] where positions.data is not null). Types
// alike.
void embedding_forward(Threads& threads, std::span<const std::int32_t> tokens, std::size_t length,
                       std::size_t width, ConstArray table, ConstArray positions, std::size_t first_position,
                       Array y);

// dtable[token] += sum of dy[r] over the rows r of that token, each token's rows added in order first; the
// caller has zeroed dtable (f32, [vocabulary, width]) before the first micro-batch. workspace:
// embedding_backward_workspace bytes.
std::size_t embedding_backward_workspace(std::size_t rows, std::size_t width);
void embedding_backward(Threads& threads, std::span<const std::int32_t> tokens, std::size_t width,
                        ConstArray dy, float* dtable, void* workspace);
// dpositions[t] (+)= sum over sequences b of dy[b * length + t], in order of b. Rows length .. capacity - 1
// are zeroed where not accumulate.
void position_backward(Threads& threads, std::size_t batch, std::size_t length, std::size_t capacity,
                       std::size_t width, ConstArray dy, float* dpositions, bool accumulate);

}  // namespace sluice::kernels
