#pragma once
#include <cstddef>
#include <span>

#include "core/dtype.h"
#include "core/threads.h"

namespace sluice::kernels {

// Rotary position embedding (Su et al. 2021), in place, in the half-split form of Hugging Face's Llama:
// element i of a head turns with element i + head_width / 2 by the angle position * frequency[i]. x: row r
// (position first_position + r % length) at r * stride elements, `heads` heads of head_width each. inverse
// turns back: the gradient. frequencies: head_width / 2 values, f64.
void rope(Threads& threads, std::size_t rows, std::size_t length, std::size_t first_position,
          std::size_t heads, std::size_t head_width, std::size_t stride, std::span<const double> frequencies,
          bool inverse, Array x);

}  // namespace sluice::kernels
