#pragma once
#include "models/graph/graph.h"

namespace sluice::models {

struct LossShape {
  std::size_t rows = 0, width = 0, vocabulary = 0;
  Dtype type = Dtype::kF32;
  ParameterUse weight;  // [vocabulary, width]
};

// Rows whose logits exist at a time: a rule of shapes alone. The head's weight and its gradient are gone
// through for every such piece, so a piece is of so many rows that the products outweigh that, while its
// logits take at most half of what the gradient takes (or fit kLogitsBytes, where that is more).
inline constexpr std::size_t kLogitRows = 512;
inline constexpr std::size_t kLogitsBytes = std::size_t{32} << 20;
std::size_t logit_rows(const LossShape& shape);

// Logits, cross-entropy and their gradients, piece by piece of rows: logits of the whole batch never exist.
// Backward computes the loss as well, so that training needs no forward pass of it; forward computes the loss
// alone (or, where the execution asks for them, the logits of one row).
std::unique_ptr<Op> make_loss(std::string name, ValueId x, const LossShape& shape);

}  // namespace sluice::models
