#pragma once
#include <memory>
#include <vector>

#include "comm/given.h"
#include "engine/layout/layout.h"
#include "engine/plan/plan.h"
#include "engine/plan/profile.h"

namespace sluice::engine {

// What each rank gives of its buffer for a use of a unit's gradient, by unit and use, where ranks compute
// parts of layers (Profile::written). Null: each gives all of it.
using GivenElements = std::vector<std::vector<std::shared_ptr<const comm::Given>>>;
GivenElements given_elements(const Layout& layout, const Profile& profile, const RankOf& ranks);

}  // namespace sluice::engine
