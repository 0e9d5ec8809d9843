#pragma once
#include <vector>

#include "kernels/attention.h"
#include "models/graph/context.h"
#include "models/graph/cut.h"
#include "models/graph/graph.h"

namespace sluice::models {

struct AttentionSizes {
  std::size_t batch = 0, length = 0, head_width = 0;
  std::size_t all_heads = 0;  // of the layer
  float dropout = 0;
  Dtype type = Dtype::kF32;
  std::vector<HeadPiece> pieces = {};  // those of this rank
  SequenceCut sequence = {};
  std::size_t heads() const;  // of queries, of all these pieces
};

// The heads of a piece, and the offsets of the piece in the arrays.
struct AttentionPiece {
  HeadPiece of;
  std::size_t head_width = 0, packed = 0, output = 0, log_sums = 0;
  std::size_t keys() const { return of.heads.size * head_width; }
  std::size_t values() const { return (of.heads.size + of.kv_heads.size) * head_width; }
  std::size_t packed_width() const { return of.packed() * head_width; }
};
std::vector<AttentionPiece> placed_pieces(const AttentionSizes& sizes);

// Declares the log-sums that attention keeps for backward, its second output.
Value attention_log_sums(std::string name, const AttentionSizes& sizes);

// Causal self-attention over packed rows of queries, keys and values. Each piece has rows in an array of its
// own, one array after the other, and likewise outputs.
std::unique_ptr<Op> make_attention(std::string name, ValueId packed, ValueId y, ValueId log_sums,
                                   const AttentionSizes& sizes);
// The same where sequences are cut into pieces: ranks all-gather keys and values before attention, and the
// gradients of these are summed over all pieces (Llama 3, Dubey et al. 2024, section 3.3.2). The arrays are
// those of one piece of sequences after another.
std::unique_ptr<Op> make_sequence_attention(std::string name, ValueId packed, ValueId y, ValueId log_sums,
                                            const AttentionSizes& sizes);
OpSpec attention_spec(std::string name, ValueId packed, ValueId y, ValueId log_sums,
                      const AttentionSizes& sizes);
// For sizes of workspaces, without a context.
kernels::AttentionShape attention_shape(const AttentionSizes& sizes, const AttentionPiece& piece);
kernels::AttentionShape attention_shape(const OpContext& context, const AttentionSizes& sizes,
                                        const AttentionPiece& piece);

}  // namespace sluice::models
