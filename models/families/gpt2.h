#pragma once
#include "models/families/family.h"

namespace sluice::models {

// GPT-2 (Radford et al. 2019): learned positions, pre-LayerNorm, GELU, a tied head; weights are [in, out].
extern const Family kGpt2;

}  // namespace sluice::models
