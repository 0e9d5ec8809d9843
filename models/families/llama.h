#pragma once
#include "models/families/builder.h"

namespace sluice::models {

// Llama (Touvron et al. 2023) and Qwen2: rotary positions, RMSNorm, SwiGLU, grouped queries; weights are
// [out, in].
Architecture make_llama(const Shape& shape);

}  // namespace sluice::models
