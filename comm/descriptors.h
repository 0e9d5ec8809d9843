#pragma once
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/descriptor.h"

namespace sluice::comm {

// What the ranks of one host have opened, for each of them.
struct Descriptors {
  std::vector<Descriptor> of_ranks;  // by rank; none of this one's own
  std::string problem;               // why there are none: the same on all ranks; empty: there are
};
// Collective: gives each rank's descriptor to all others, which get one of their own of the same file. They
// pass through sockets without a name in any file system, which the system keeps to this machine's network
// namespace. own: null where this rank has none, as `problem` says; then no rank gets any. REQUIRES: all
// ranks are on one host. Throws as Communicator::exchange().
Descriptors exchange_descriptors(Communicator& communicator, std::uint64_t id, const std::string& name,
                                 const Descriptor* own, const std::string& problem);

}  // namespace sluice::comm
