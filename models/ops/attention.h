#pragma once
#include <vector>

#include "models/graph/cut.h"
#include "models/graph/graph.h"

namespace sluice::models {

struct AttentionSizes {
  std::size_t batch = 0, length = 0, head_width = 0;
  std::size_t all_heads = 0;  // of the layer
  float dropout = 0;
  Dtype type = Dtype::kF32;
  std::vector<HeadPiece> pieces = {};  // those of this rank
  std::size_t heads() const;           // of queries, of all these pieces
  std::size_t packed_heads() const;    // with those of keys and values
};

// The log-sums that attention keeps, which are its second output.
Value attention_log_sums(std::string name, const AttentionSizes& sizes);

// Causal self-attention over packed rows of queries, keys and values. Each piece has its rows in an array of
// its own, of which one follows the other, and so have the outputs.
std::unique_ptr<Op> make_attention(std::string name, ValueId packed, ValueId y, ValueId log_sums,
                                   const AttentionSizes& sizes);

}  // namespace sluice::models
