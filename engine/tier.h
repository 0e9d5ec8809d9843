#pragma once
#include "allocator/ledger.h"

namespace sluice::engine {

// The tier on which the model is computed: what lives there is always present. Where the CPU computes, this
// is host memory.
inline constexpr allocator::Tier kComputeTier = allocator::Tier::kHost;

}  // namespace sluice::engine
