#pragma once
#include <memory>
#include <vector>

#include "comm/given.h"
#include "engine/layout/layout.h"
#include "engine/plan/plan.h"
#include "engine/plan/profile.h"

namespace sluice::engine {

// By unit and use of its gradient, the elements of the buffer that each rank gives to the sum, where ranks
// compute parts of layers (Profile::written). Null: each rank gives all.
using GivenElements = std::vector<std::vector<std::shared_ptr<const comm::Given>>>;
GivenElements given_elements(const Layout& layout, const Profile& profile, const RankOf& ranks);

}  // namespace sluice::engine
