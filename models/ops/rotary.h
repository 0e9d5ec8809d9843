#pragma once
#include <cstddef>
#include <vector>

#include "core/dtype.h"
#include "core/threads.h"
#include "models/families/config.h"

namespace sluice::models {

// Rotary embedding of the queries and keys in packed rows: heads of queries, then heads of keys, then what is
// not turned.
struct Rotary {
  std::size_t length = 0, heads = 0, head_width = 0, stride = 0;  // heads: of queries and keys together
  std::vector<double> frequencies;
};

// As transformers computes them, with Llama 3's stretching where the configuration has it.
std::vector<double> rotary_frequencies(const ModelConfig& config);

void turn(Threads& threads, const Rotary& rotary, std::size_t rows, std::size_t first_position, bool inverse,
          Array packed);

}  // namespace sluice::models
