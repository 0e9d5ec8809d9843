#pragma once
#include <optional>
#include <vector>

#include "models/graph/graph.h"
#include "models/ops/rotary.h"

namespace sluice::models {

// One weight of a linear op and where its product goes in the output.
struct LinearPart {
  std::size_t weight = 0;           // slot
  std::optional<std::size_t> bias;  // slot
  std::size_t width = 0;            // columns of the product
  std::size_t offset = 0;           // elements from the start of the output to the product's first row
  std::size_t stride = 0;           // elements from row to row
};

struct LinearShape {
  std::size_t rows = 0, in = 0;
  bool transposed = false;  // weights are [out, in] (Llama), else [in, out] (GPT-2)
  Dtype type = Dtype::kF32;
  std::vector<LinearPart> parts;
  std::optional<Rotary> rotary;  // turns the first columns of the output
};

// y = x W + b, for one weight or several that share their input (query, key and value; gate and up).
std::unique_ptr<Op> make_linear(std::string name, ValueId x, ValueId y, const LinearShape& shape);

}  // namespace sluice::models
