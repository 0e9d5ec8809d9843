#pragma once
#include "allocator/ledger.h"

namespace sluice::engine {

// The tier that is computed on where the CPU computes. What is on that tier is always present; a plan says
// which tier it is (UnitPlan::compute).
inline constexpr allocator::Tier kCpuTier = allocator::Tier::kHost;

}  // namespace sluice::engine
