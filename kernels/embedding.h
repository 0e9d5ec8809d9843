#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/dtype.h"
#include "core/threads.h"

namespace sluice::kernels {

// y[r] = table[tokens[r]], plus positions[first_position + r % length] where positions.data is not null. All
// arrays are of one type.
void embedding_forward(Threads& threads, std::span<const std::int32_t> tokens, std::size_t length,
                       std::size_t width, ConstArray table, ConstArray positions, std::size_t first_position,
                       Array y);

// dtable[token] += the sum of dy[r] over the rows r of that token, which are added in order first. dtable is
// f32, [vocabulary, width], and zeroed by the caller before the first micro-batch. REQUIRES: workspace has
// embedding_backward_workspace() bytes.
std::size_t embedding_backward_workspace(std::size_t rows);
void embedding_backward(Threads& threads, std::span<const std::int32_t> tokens, std::size_t width,
                        ConstArray dy, float* dtable, void* workspace);
// dpositions[t] = (or +=, where accumulate) the sum of dy[b * length + t] over sequences b, in order. Rows
// length .. capacity - 1 are zeroed unless accumulate.
void position_backward(Threads& threads, std::size_t batch, std::size_t length, std::size_t capacity,
                       std::size_t width, ConstArray dy, float* dpositions, bool accumulate);

}  // namespace sluice::kernels
