#pragma once
#include <optional>
#include <vector>

#include "models/graph/cut.h"
#include "models/graph/graph.h"

namespace sluice::models {

struct ResidualShape {
  std::size_t width = 0, length = 0;  // of a whole sequence
  std::vector<RowPart> rows = {};
  float dropout = 0;
  Dtype type = Dtype::kF32;
};

// y = residual + dropout(branch); without a residual, y = dropout(branch).
std::unique_ptr<Op> make_residual(std::string name, std::optional<ValueId> residual, ValueId branch,
                                  ValueId y, const ResidualShape& shape);

}  // namespace sluice::models
