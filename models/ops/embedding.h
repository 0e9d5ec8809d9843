#pragma once
#include <optional>
#include <vector>

#include "models/graph/cut.h"
#include "models/graph/graph.h"

namespace sluice::models {

struct EmbeddingShape {
  std::size_t width = 0;
  std::vector<RowPart> rows = {};
  std::size_t vocabulary = 0, context = 0;
  Dtype type = Dtype::kF32;
  ParameterUse table;
  std::optional<ParameterUse> positions;
  TensorCut cut = {};  // all ranks compute the same
};

// y[r] = table[token r] (+ positions[r % length]).
std::unique_ptr<Op> make_embedding(std::string name, ValueId y, const EmbeddingShape& shape);

}  // namespace sluice::models
