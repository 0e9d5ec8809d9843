#pragma once
#include "models/families/builder.h"

namespace sluice::models {

// GPT-2 (Radford et al. 2019): learned positions, LayerNorm before each part, GELU, a tied head; weights are
// [in, out].
Architecture make_gpt2(const Shape& shape);

}  // namespace sluice::models
