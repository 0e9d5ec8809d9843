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

// The rows whose logits exist at a time, a tile, follow from shapes alone. Every tile reads the head's weight
// and adds to its gradient, so that it has enough rows for its products to outweigh that, while its logits
// take at most half of what the gradient takes (or fit kLogitsBytes, where that is more).
inline constexpr std::size_t kLogitRows = 512;
inline constexpr std::size_t kLogitsBytes = std::size_t{32} << 20;
std::size_t logit_rows(const LossShape& shape);

// Logits, cross-entropy and their gradients, tile by tile: logits of the whole micro-batch never exist.
// Backward computes the loss as well, so that training needs no forward pass of it; forward computes the loss
// alone (or, where the execution asks for them, the logits of one row).
std::unique_ptr<Op> make_loss(std::string name, ValueId x, const LossShape& shape);
// The same where the vocabulary is cut: each rank has the logits of its pieces, and all learn of each row
// what the loss needs (Megatron-LM's vocabulary-parallel cross-entropy).
std::unique_ptr<Op> make_cut_loss(std::string name, ValueId x, const LossShape& shape);

}  // namespace sluice::models
