#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "core/threads.h"

// Arrays here are f32, bf16 or f16 (the types of one call may differ unless stated); arithmetic is f32. n:
// elements. Arrays may be the same one (in place), and must not overlap otherwise.
namespace sluice::kernels {

void convert(Threads& threads, std::size_t n, ConstArray from, Array to);  // from any of the types to any
// The same for rows that lie from_stride and to_stride elements apart; a from_stride of 0 repeats one row.
void convert_rows(Threads& threads, std::size_t rows, std::size_t columns, ConstArray from,
                  std::size_t from_stride, Array to, std::size_t to_stride);
void fill(Threads& threads, std::size_t n, float value, Array to);
void add(Threads& threads, std::size_t n, ConstArray a, ConstArray b, Array sum);
void scale(Threads& threads, std::size_t n, float factor, Array x);

// Turns f32 values into a type of 2 bytes, packed into the first half of the same memory; f32 stay as they
// are.
void narrow_in_place(Threads& threads, std::size_t n, float* values, Dtype type);

// Normal(mean, deviation): element i depends on (seed, stream, i) alone. Box-Muller over Philox words.
void fill_normal(Threads& threads, std::size_t n, std::uint64_t seed, std::uint64_t stream,
                 std::uint64_t first_index, float mean, float deviation, Array to);

// GELU, tanh form: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). Hendrycks, Gimpel 2016.
void gelu_forward(Threads& threads, std::size_t n, ConstArray x, Array y);
void gelu_backward(Threads& threads, std::size_t n, ConstArray x, ConstArray dy, Array dx);
// SwiGLU: y = silu(gate) * up. Shazeer 2020.
void swiglu_forward(Threads& threads, std::size_t n, ConstArray gate, ConstArray up, Array y);
void swiglu_backward(Threads& threads, std::size_t n, ConstArray gate, ConstArray up, ConstArray dy,
                     Array dgate, Array dup);

// Dropout by counter: element i is kept where word (first_index + i) of the stream (seed, stream) is below 1
// - p, and is then multiplied by 1 / (1 - p). y = residual + dropout(x); residual may be {nullptr}: none. p
// == 0: no words are made.
void dropout_add(Threads& threads, std::size_t n, ConstArray x, ConstArray residual, float p,
                 std::uint64_t seed, std::uint64_t stream, std::uint64_t first_index, Array y);
// dx = mask(dy) / (1 - p): the same words.
void dropout_backward(Threads& threads, std::size_t n, ConstArray dy, float p, std::uint64_t seed,
                      std::uint64_t stream, std::uint64_t first_index, Array dx);

}  // namespace sluice::kernels
