#pragma once
#include <cstddef>
#include <optional>
#include <vector>

#include "engine/planner/inputs.h"

// Private to the plan.
namespace sluice::engine {

// Step times within this share of each other count as equal.
inline constexpr double kSame = 0.005;
// Prefers short steps, then little wear of the disk and little from other ranks, then looking far ahead, then
// room in which what is fetched waits for others, then little memory.
bool faster(const Plan& a, const Plan& b);

// How many micro-batches may pass through a unit together, from the most to the least.
std::vector<std::size_t> group_sizes_of(std::size_t micro_batches);

// Returns the plan that make_plan() would at the stages of the request, if any fits. Throws
// Error(kInvalidArgument) as make_plan(). REQUIRES: the stages are given, and the group, where gradients are
// added pairwise.
std::optional<Plan> find_plan(const PlanInputs& in);
// Throws why there is none: Error(kBudget).
[[noreturn]] void refuse_plan(const PlanInputs& in);

}  // namespace sluice::engine
