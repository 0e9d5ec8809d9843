#pragma once
#include <cstddef>
#include <vector>

#include "core/dtype.h"
#include "core/threads.h"

namespace sluice::models {

// Rotary embedding of the queries and keys in packed rows: heads of queries, then heads of keys, then what is
// not turned.
struct Rotary {
  std::size_t length = 0, heads = 0, head_width = 0, stride = 0;  // heads: of queries and keys together
  std::vector<double> frequencies;
};

void turn(Threads& threads, const Rotary& rotary, std::size_t rows, std::size_t first_position, bool inverse,
          Array packed);

}  // namespace sluice::models
