#pragma once
#include <optional>

#include "models/graph/graph.h"

namespace sluice::models {

struct ResidualShape {
  std::size_t elements = 0, sample_elements = 0;  // of the micro-batch, and of one sequence of it
  float dropout = 0;
  Dtype type = Dtype::kF32;
};

// y = residual + dropout(branch); without a residual, y = dropout(branch).
std::unique_ptr<Op> make_residual(std::string name, std::optional<ValueId> residual, ValueId branch,
                                  ValueId y, const ResidualShape& shape);

}  // namespace sluice::models
