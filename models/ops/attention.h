#pragma once
#include "models/graph/graph.h"

namespace sluice::models {

struct AttentionSizes {
  std::size_t batch = 0, length = 0, heads = 0, kv_heads = 0, head_width = 0;
  float dropout = 0;
  Dtype type = Dtype::kF32;
  std::size_t packed_width() const { return (heads + 2 * kv_heads) * head_width; }
};

// The log-sums that attention keeps, which are its second output.
Value attention_log_sums(std::string name, const AttentionSizes& sizes);

// Causal self-attention over packed rows of queries, keys and values.
std::unique_ptr<Op> make_attention(std::string name, ValueId packed, ValueId y, ValueId log_sums,
                                   const AttentionSizes& sizes);

}  // namespace sluice::models
