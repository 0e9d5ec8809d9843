#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "core/threads.h"

namespace sluice::kernels {

// Causal self-attention of `batch` sequences of `length` tokens. Query head h uses key/value head h / (heads
// / kv_heads). Token t of sequence b, head h begins in q at element (b * length + t) * q_stride + h *
// head_width; k and v have the same layout with kv_heads heads and their own strides. The output is dense:
// [batch * length, heads * head_width].
//
// Dropout of the probabilities is that of dropout_add() (elementwise.h), where key j of query i has index
// first_index + ((b * all_heads + h) * length + i) * length + j. all_heads is the number of heads in the
// layer where `heads` is a part of them; 0: equal to `heads`. Where `queries` is not 0, only the queries
// first_query ... first_query + queries - 1 of each sequence are computed, and q, the output, log_sum and
// their gradients have only these rows; both are multiples of kQueryGrain.
inline constexpr std::size_t kQueryGrain = 64;
struct AttentionShape {
  std::size_t batch = 0, length = 0, heads = 0, kv_heads = 0, head_width = 0;
  std::size_t q_stride = 0, k_stride = 0, v_stride = 0;
  float scale = 0;  // multiplies the scores: 1 / sqrt(head_width)
  float dropout = 0;
  std::uint64_t seed = 0, stream = 0, first_index = 0;
  std::size_t all_heads = 0;
  std::size_t first_query = 0, queries = 0;
};

// FlashAttention (Dao et al. 2022): works on tiles of queries and keys, and never holds a length x length
// matrix. log_sum is [batch, heads, length] of f32, an input of backward. Each tile of queries is one task,
// so that the bits do not depend on the number of threads.
std::size_t attention_forward_workspace(const AttentionShape& shape, int threads);  // bytes
void attention_forward(Threads& threads, const AttentionShape& shape, ConstArray q, ConstArray k,
                       ConstArray v, Array out, float* log_sum, void* workspace);

// dq, dk, dv have the layout and strides of q, k, v, and are overwritten.
std::size_t attention_backward_workspace(const AttentionShape& shape, int threads);  // bytes
void attention_backward(Threads& threads, const AttentionShape& shape, ConstArray q, ConstArray k,
                        ConstArray v, ConstArray out, const float* log_sum, ConstArray dout, Array dq,
                        Array dk, Array dv, void* workspace);

// Attention of one query of each of shape.batch sequences over its `length` cached keys and values, without
// dropout, for generation. Row t of sequence b begins in k and v at (b * length_capacity + t) * stride.
void attention_decode(Threads& threads, const AttentionShape& shape, std::size_t length_capacity,
                      ConstArray q, ConstArray k, ConstArray v, Array out);

}  // namespace sluice::kernels
