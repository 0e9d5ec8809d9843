#pragma once
#include <cstddef>
#include <vector>

#include "engine/memory/next_uses.h"

namespace sluice::engine {

// Assigns each holding of a cyclic schedule fixed frames of its own. A holding shares frames only with
// holdings that are used as far from it in the cycle as possible, so that both are seldom needed together. On
// a GPU a holding that returns to the same frames needs no mapping call. Two holdings share no frame where,
// for each of them, all frames suffice for every holding that is used no further from it than the other one.
//
// schedule: the holdings of each access, in order. held: by access, the holdings in use from an earlier
// access until a later one; it may be shorter than the schedule. extents: by holding, how many it takes; 0
// where it has no frames. Returns by holding its frame numbers, all below `frames`; none for a holding that
// the schedule does not name or that takes more frames than there are. The result is deterministic. The time
// grows with the number of uses (those of `held` at each access included) times the number of frames:
// seconds, where there are thousands of both.
//
// The algorithm is a greedy colouring of a graph whose nodes are holdings and whose edge costs are closeness.
// An optimal colouring is not sought: no algorithm is known that takes less than exponential time (Garey,
// Johnson, Miller and Papadimitriou, "The complexity of coloring circular arcs and chords", 1980).
std::vector<std::vector<std::size_t>> assign_frames(const std::vector<std::vector<HoldingId>>& schedule,
                                                    const std::vector<std::vector<HoldingId>>& held,
                                                    const std::vector<std::size_t>& extents,
                                                    std::size_t frames);

}  // namespace sluice::engine
