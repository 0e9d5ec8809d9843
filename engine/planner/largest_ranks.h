#pragma once
#include <vector>

#include "engine/plan/plan.h"
#include "engine/plan/profile.h"
#include "optim/optimizer.h"

// Private to the plan.
namespace sluice::engine {

// The ranks that need most for a plan, which differ in their shards and in what they relay: all where they
// are few. Of many it looks at those alone of which no other rank has as much of each unit, and of these at
// the few that have most, since each plan takes long where ranks are many.
std::vector<int> largest_ranks(const Profile& profile, const optim::Optimizer& optimizer,
                               const PlanRequest& request);

}  // namespace sluice::engine
