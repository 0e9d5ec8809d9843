#pragma once
#include <cstddef>
#include <span>

#include "core/dtype.h"
#include "core/threads.h"

namespace sluice::kernels {

// Rotary position embedding (Su et al. 2021), in place, in the half-split form of Hugging Face's Llama:
// element i of a head and element i + head_width / 2 are rotated by the angle position * frequencies[i]. Row
// r of x has position first_position + r % length and begins at element r * stride, with `heads` heads.
// `inverse` rotates back, as for the gradient. There are head_width / 2 frequencies.
void rope(Threads& threads, std::size_t rows, std::size_t length, std::size_t first_position,
          std::size_t heads, std::size_t head_width, std::size_t stride, std::span<const double> frequencies,
          bool inverse, Array x);

}  // namespace sluice::kernels
