#pragma once
#include <cstddef>
#include <optional>

#include "engine/layout/layout.h"
#include "engine/plan/plan.h"
#include "engine/plan/profile.h"

namespace sluice::engine {

// The most rows of the parameter in which all ranks together have values of that use's gradient, in one step.
// Nothing: ranks sum that use whole, as a step's tokens may be in all rows, or no other rank is there. It
// depends on the model and on the data of a step alone, and is the same on all ranks.
std::optional<std::size_t> rows_of_tokens(const ParameterSpec& parameter, int use, const RankOf& ranks,
                                          const Profile& profile);

// Whether ranks sum any gradient of the profile by rows, so that how much they send depends on the data.
bool sums_by_rows(const Profile& profile, const RankOf& ranks);

}  // namespace sluice::engine
