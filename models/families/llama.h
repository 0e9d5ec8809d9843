#pragma once
#include "models/families/family.h"

namespace sluice::models {

// Llama 1 to 3 (Touvron et al. 2023), Mistral (Jiang et al. 2023) without a sliding window, and Qwen2 with
// biases in its attention: rotary positions, RMSNorm, SwiGLU, grouped-query attention; weights are [out, in].
extern const Family kLlama, kQwen2, kMistral;

}  // namespace sluice::models
