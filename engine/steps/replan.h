#pragma once
#include <functional>

#include "allocator/memory.h"
#include "engine/steps/stores.h"

// Private to this room. The caller has checked the preconditions.
namespace sluice::engine {

// See AnyOrderEngine::leave() and AnyOrderEngine::replan().
void leave(Stores& stores, bool with_values, const std::function<void(UnitId, allocator::FormerHome)>& take);
void replan(Stores& stores, const Plan& next);

}  // namespace sluice::engine
