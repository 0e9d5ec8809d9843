#pragma once
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "engine/plan/plan.h"

// What ranks tell each other before they have engines, and while they save. Calls are collective, and wait;
// `meanwhile` is called from time to time.
namespace sluice::engine {

// Returns what each rank has given. Calls of the same name are in the same order on all ranks.
std::vector<std::string> exchange(comm::Communicator& communicator, const std::string& name,
                                  const std::string& own, const std::function<void()>& meanwhile = {});

// What a plan has to know of the ranks.
RankOf rank_of(const comm::Communicator& communicator);

// Makes what must be alike in the plans of all ranks so, in the request for this and for later plans: the
// highest stage of each unit, or the lowest one, and the shortest chunks; and the host's memory joins GPUs
// where one rank's plan has that, and none asks for another or fits with no other. Returns whether `plan` has
// others, so that the rank plans again.
enum class Stages : std::uint8_t { kHighest, kLowest };
bool agree_on_plan(comm::Communicator& communicator, const Plan& plan, PlanRequest& request,
                   const std::function<void()>& meanwhile = {}, Stages chosen = Stages::kHighest);

// Comes before that where ranks compute a micro-batch together (plan.ranks.together > 1), and add up
// what they have in between, so that all must compute the same in the same order: the fewest micro-batches of
// a group, and the way of recomputation that keeps least. Returns whether `plan` has others. Throws
// Error(kInvalidArgument), on all ranks, where they do not have that way in common.
bool agree_on_order(comm::Communicator& communicator, const Plan& plan, const Profile& profile,
                    PlanRequest& request, const std::function<void()>& meanwhile = {});

}  // namespace sluice::engine
