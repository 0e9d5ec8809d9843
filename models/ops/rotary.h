#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include "core/dtype.h"
#include "core/threads.h"
#include "models/graph/cut.h"

namespace sluice::models {

// Rotary embedding of the queries and keys in packed rows: heads of queries, then heads of keys, then columns
// that are not rotated.
struct Rotary {
  std::size_t heads = 0, head_width = 0, stride = 0;  // heads: of queries and keys together
  std::vector<double> frequencies;
};

// first_position: the position of each sequence's first token.
void turn(Threads& threads, const Rotary& rotary, std::span<const RowPart> rows, std::size_t first_position,
          bool inverse, Array packed);

}  // namespace sluice::models
