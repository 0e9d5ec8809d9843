#pragma once
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "engine/plan/plan.h"

// Agreements of ranks before they have engines, and while they save. Calls are collective, and wait;
// `meanwhile` is called from time to time.
namespace sluice::engine {

// Returns the text of each rank, by rank. Calls of the same name are in the same order on all ranks.
std::vector<std::string> exchange(comm::Communicator& communicator, const std::string& name,
                                  const std::string& own, const std::function<void()>& meanwhile = {});

// This rank's place among the ranks, for its plan.
RankOf rank_of(const comm::Communicator& communicator);

// Makes the plans of all ranks agree where they must, in the request for this and for later plans: the
// highest stage of each unit, or the lowest one; the shortest chunks; the slowest place of parameter shards,
// where a rank without them counts with host memory, or with its GPU if it asks for updates or state there;
// and an exchange in host memory where one rank's plan has that, unless a rank asks for GPU memory or fits
// with nothing else. Returns whether `plan` differs, so that the rank plans again.
enum class Stages : std::uint8_t { kHighest, kLowest };
bool agree_on_plan(comm::Communicator& communicator, const Plan& plan, PlanRequest& request,
                   const std::function<void()>& meanwhile = {}, Stages chosen = Stages::kHighest);

// Call before agree_on_plan() where ranks compute a micro-batch together (plan.ranks.together > 1), and sum
// partial results, so that all must compute the same in the same order: agrees on the smallest group of
// micro-batches, and the recomputation that keeps least. Returns whether `plan` differs. Throws
// Error(kInvalidArgument), on all ranks, where they do not have that recomputation in common.
bool agree_on_order(comm::Communicator& communicator, const Plan& plan, const Profile& profile,
                    PlanRequest& request, const std::function<void()>& meanwhile = {});

}  // namespace sluice::engine
