#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "core/threads.h"

// Elementwise functions. Arrays have n elements of f32, bf16 or f16 (types in one call may differ unless
// stated); arithmetic is f32. Two arrays of a call are the same one (in place) or do not overlap.
namespace sluice::kernels {

void convert(Threads& threads, std::size_t n, ConstArray from, Array to);
// Converts rows that begin from_stride and to_stride elements apart. A from_stride of 0 repeats one row.
void convert_rows(Threads& threads, std::size_t rows, std::size_t columns, ConstArray from,
                  std::size_t from_stride, Array to, std::size_t to_stride);
void fill(Threads& threads, std::size_t n, float value, Array to);
void add(Threads& threads, std::size_t n, ConstArray a, ConstArray b, Array sum);
void scale(Threads& threads, std::size_t n, float factor, Array x);

// Converts f32 to a 2-byte type in place, packed into the first half of the memory. Does nothing for f32.
void narrow_in_place(Threads& threads, std::size_t n, float* values, Dtype type);

// Fills with Normal(mean, deviation), by Box-Muller over Philox words. The value of element i depends on
// (seed, stream, first_index + i) alone.
void fill_normal(Threads& threads, std::size_t n, std::uint64_t seed, std::uint64_t stream,
                 std::uint64_t first_index, float mean, float deviation, Array to);

// GELU, tanh form: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). Hendrycks, Gimpel 2016.
void gelu_forward(Threads& threads, std::size_t n, ConstArray x, Array y);
void gelu_backward(Threads& threads, std::size_t n, ConstArray x, ConstArray dy, Array dx);
// SwiGLU: y = silu(gate) * up. Shazeer 2020.
void swiglu_forward(Threads& threads, std::size_t n, ConstArray gate, ConstArray up, Array y);
void swiglu_backward(Threads& threads, std::size_t n, ConstArray gate, ConstArray up, ConstArray dy,
                     Array dgate, Array dup);

// y = residual + dropout(x); residual.data may be null. Dropout is counter-based: element i is kept where
// word (first_index + i) of the stream (seed, stream) is below 1 - p, and is then multiplied by 1 / (1 - p).
// No random words are computed where p is 0.
void dropout_add(Threads& threads, std::size_t n, ConstArray x, ConstArray residual, float p,
                 std::uint64_t seed, std::uint64_t stream, std::uint64_t first_index, Array y);
// dx = dy / (1 - p) where dropout_add() kept the element, else 0.
void dropout_backward(Threads& threads, std::size_t n, ConstArray dy, float p, std::uint64_t seed,
                      std::uint64_t stream, std::uint64_t first_index, Array dx);

}  // namespace sluice::kernels
