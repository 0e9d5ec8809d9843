#pragma once
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/descriptor.h"

namespace sluice::comm {

// Descriptors of files that the ranks of one host have opened, duplicated for each of them.
struct Descriptors {
  std::vector<Descriptor> of_ranks;  // by rank; this rank's own entry is empty
  std::string problem;               // why there are no descriptors, the same on all ranks; empty: there are
};
// Collective: duplicates each rank's descriptor into all other ranks. Descriptors pass through abstract Unix
// sockets, which have no name in a file system and are visible only in this network namespace. own: null
// where this rank has none, for the reason in `problem`; then no rank gets any. REQUIRES: all ranks are on
// one host. Throws as Communicator::exchange().
Descriptors exchange_descriptors(Communicator& communicator, std::uint64_t id, const std::string& name,
                                 const Descriptor* own, const std::string& problem);

}  // namespace sluice::comm
