#pragma once
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"
#include "core/threads.h"

namespace sluice::kernels {

// Causal self-attention of `batch` sequences of `length` tokens. Query head h uses key/value head h / (heads
// / kv_heads). q: token t of sequence b, head h begins at q + ((b * length + t) * q_stride + h * head_width)
// elements; k, v likewise with kv_heads and their strides; out is [batch * length, heads * head_width],
// dense. Dropout of the probabilities: as dropout_add in elementwise.h, with index ((b * heads + h) * length
// + i) * length + j.
struct AttentionShape {
  std::size_t batch = 0, length = 0, heads = 0, kv_heads = 0, head_width = 0;
  std::size_t q_stride = 0, k_stride = 0, v_stride = 0;
  float scale = 0;  // of the scores: 1 / sqrt(head_width)
  float dropout = 0;
  std::uint64_t seed = 0, stream = 0, first_index = 0;
};

// Works on tiles of queries and keys (Dao et al. 2022): never a length x length matrix. log_sum: [batch,
// heads, length] f32, kept for backward. Each (sequence, head, query tile) is one task, so the bits do not
// depend on the threads.
std::size_t attention_forward_workspace(const AttentionShape& shape, int threads);  // bytes
void attention_forward(Threads& threads, const AttentionShape& shape, ConstArray q, ConstArray k,
                       ConstArray v, Array out, float* log_sum, void* workspace);

// dq, dk, dv have the layout and strides of q, k, v, and are overwritten.
std::size_t attention_backward_workspace(const AttentionShape& shape, int threads);  // bytes
void attention_backward(Threads& threads, const AttentionShape& shape, ConstArray q, ConstArray k,
                        ConstArray v, ConstArray out, const float* log_sum, ConstArray dout, Array dq,
                        Array dk, Array dv, void* workspace);

// One query a sequence against `length` cached keys and values, for generation; shape.batch sequences, no
// dropout. k and v: row t of sequence b at ((b * length_capacity + t) * stride).
void attention_decode(Threads& threads, const AttentionShape& shape, std::size_t length_capacity,
                      ConstArray q, ConstArray k, ConstArray v, Array out);

}  // namespace sluice::kernels
