#pragma once
#include "models/graph/graph.h"

namespace sluice::models {

// y = gelu(x), elementwise.
std::unique_ptr<Op> make_gelu(std::string name, ValueId x, ValueId y, std::size_t elements, Dtype type);

// y = silu(gate) * up; gates_and_ups holds all gates, then all ups: 2 * elements.
std::unique_ptr<Op> make_swiglu(std::string name, ValueId gates_and_ups, ValueId y, std::size_t elements,
                                Dtype type);

}  // namespace sluice::models
