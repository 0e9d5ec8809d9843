#pragma once
#include "models/graph/cut.h"
#include "models/graph/graph.h"

namespace sluice::models {

struct LossShape {
  std::size_t rows = 0, width = 0, vocabulary = 0;
  Dtype type = Dtype::kF32;
  ParameterUse weight;  // [vocabulary, width]
  TensorCut cut = {};   // of the vocabulary
};

// Logits are computed in tiles of rows, whose size follows from shapes alone. Every tile reads the head's
// weight and accumulates into its gradient. So a tile has enough rows for its products to outweigh that
// traffic, while its logits take at most half of the gradient's memory (or kLogitsBytes, if that is more).
inline constexpr std::size_t kLogitRows = 512;
inline constexpr std::size_t kLogitsBytes = std::size_t{32} << 20;
std::size_t logit_rows(const LossShape& shape);

// Logits, cross-entropy and their gradients, tile by tile: the logits of a whole micro-batch never exist at
// once. Backward computes the loss as well, so that training needs no forward pass of it. Forward computes
// the loss alone, or the logits of one row where the execution asks for them.
std::unique_ptr<Op> make_loss(std::string name, ValueId x, const LossShape& shape);
// The same where the vocabulary is cut: each rank computes the logits of its pieces, and all ranks exchange
// each row's statistics (Megatron-LM's vocabulary-parallel cross-entropy).
std::unique_ptr<Op> make_cut_loss(std::string name, ValueId x, const LossShape& shape);

}  // namespace sluice::models
