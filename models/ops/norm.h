#pragma once
#include <optional>

#include "models/graph/cut.h"
#include "models/graph/graph.h"

namespace sluice::models {

struct NormShape {
  std::size_t rows = 0, width = 0;
  float epsilon = 0;
  Dtype type = Dtype::kF32;
  std::size_t gamma = 0;            // slot
  std::optional<std::size_t> beta;  // slot; with it LayerNorm, without it RMSNorm
  TensorCut cut = {};               // all ranks compute the same
};

// Declares the statistics that a norm keeps for backward, its second output.
Value norm_statistics(std::string name, const NormShape& shape);
std::unique_ptr<Op> make_norm(std::string name, ValueId x, ValueId y, ValueId statistics,
                              const NormShape& shape);

}  // namespace sluice::models
