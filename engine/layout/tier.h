#pragma once
#include "allocator/ledger.h"

namespace sluice::engine {

// The tier that is computed on where the CPU computes. Contents on that tier are always present; a plan says
// which tier it is (UnitPlan::compute).
inline constexpr allocator::Tier kCpuTier = allocator::Tier::kHost;

}  // namespace sluice::engine
