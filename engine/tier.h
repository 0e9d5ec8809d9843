#pragma once
#include "allocator/ledger.h"

namespace sluice::engine {

// The memory that is computed on: what lives there is always present. Where the CPU computes, it is the
// host's.
inline constexpr allocator::Tier kComputeTier = allocator::Tier::kHost;

}  // namespace sluice::engine
