#pragma once
#include "allocator/ledger.h"

namespace sluice::engine {

// The tier that an engine computes on where the CPU computes. What lives on the tier that is computed on is
// always present; which one that is, a plan says (UnitPlan::compute).
inline constexpr allocator::Tier kCpuTier = allocator::Tier::kHost;

}  // namespace sluice::engine
