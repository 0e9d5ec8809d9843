#pragma once
#include <optional>
#include <vector>

#include "models/graph/cut.h"
#include "models/graph/graph.h"
#include "models/ops/rotary.h"

namespace sluice::models {

// A weight of a linear op and its bias.
struct LinearWeight {
  std::size_t weight = 0;           // slot
  std::optional<std::size_t> bias;  // slot
  std::size_t width = 0;            // columns
};

// Columns of a weight, and the place of their product in the output.
struct LinearPart {
  std::size_t weight = 0;  // an index into LinearShape::weights
  Range columns;
  std::size_t offset = 0;  // elements from the start of the output to the product's first element
  std::size_t stride = 0;  // elements from row to row
  std::size_t piece = 0;   // index among the rank's pieces
};

// Columns of an output that are rotated by RoPE.
struct Turned {
  Rotary rotary;
  std::size_t offset = 0;  // elements from the start of the output
};

struct LinearShape {
  std::size_t rows = 0, in = 0;
  bool transposed = false;  // weights are [out, in] (Llama), else [in, out] (GPT-2)
  Dtype type = Dtype::kF32;
  TensorCut cut = {};
  std::vector<LinearWeight> weights = {};
  std::vector<LinearPart> parts = {};  // by piece
  std::vector<Turned> turned = {};
  std::vector<RowPart> row_parts = {};  // of rotated rows
};

// y = x W + b, for one weight or several with a common input (query, key and value; gate and up). Where
// columns are cut, the output has those of this rank's pieces, each piece in an array of its own, and the
// gradient of x is the sum over all pieces.
std::unique_ptr<Op> make_linear(std::string name, ValueId x, ValueId y, const LinearShape& shape);

struct RowLinearShape {
  std::size_t rows = 0, in = 0, out = 0;  // `in` is that of the whole weight
  bool transposed = false;
  Dtype type = Dtype::kF32;
  TensorCut cut = {};
  std::vector<Range> inputs = {};  // by own piece: its rows of W
  std::size_t weight = 0;          // slot
  std::optional<std::size_t> bias = {};
};

// y = x W + b, where x has this rank's pieces of the columns, each in an array of its own. y is the sum over
// all pieces.
std::unique_ptr<Op> make_row_linear(std::string name, ValueId x, ValueId y, const RowLinearShape& shape);

}  // namespace sluice::models
