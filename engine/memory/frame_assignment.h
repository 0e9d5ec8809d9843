#pragma once
#include <cstddef>
#include <vector>

#include "engine/memory/next_uses.h"

namespace sluice::engine {

// Gives each holding of a schedule, which repeats as a cycle, frames that are always its own: it shares them
// only with holdings that are used as far from it as may be, so that both are seldom wanted together. On a
// GPU a holding that gets the same frames each time needs no call that maps. Two holdings share no frame
// where, for each of them, the frames have room for all that is used no further from it than the other one
// is.
//
// schedule: the holdings of each access, in order. held: by access, those that are used from an earlier one
// until a later one; it may have fewer accesses than the schedule. extents: by holding, how many it takes; 0
// where it has no frames. Returns by holding the numbers of its frames, all below `frames`; of a holding that
// the schedule does not name, or that takes more than there are, none. The same arguments give the same
// frames. Takes a time that grows with the number of uses, those of what is held at each access among them,
// times the number of frames: seconds, where there are thousands of both.
//
// It is a greedy colouring of a graph in which holdings are nodes and closeness is the cost of an edge; the
// best one is not looked for, since no way is known that does not take exponential time (Garey, Johnson,
// Miller and Papadimitriou, "The complexity of coloring circular arcs and chords", 1980).
std::vector<std::vector<std::size_t>> assign_frames(const std::vector<std::vector<HoldingId>>& schedule,
                                                    const std::vector<std::vector<HoldingId>>& held,
                                                    const std::vector<std::size_t>& extents,
                                                    std::size_t frames);

}  // namespace sluice::engine
