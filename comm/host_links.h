#pragma once
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "comm/links.h"

namespace sluice::comm {

// Links among ranks on several machines. Ranks of one host exchange packets through shared memory
// (LocalMemory); only ranks of different hosts use the links that the caller gave.
struct HostLinks {
  std::unique_ptr<Links> links;
  int ranks_here = 1;  // how many ranks are on this host
  // The share of the usable cores that belongs to this rank, by CPU affinity: ranks of this host that may use
  // the same core have equal parts of it.
  double share_of_cpus = 1;
  std::size_t memory = 0;  // this rank's part of the shared memory, in bytes; 0: there is none
  bool all_here = false;   // all ranks share it, so the caller's links are destroyed
  std::vector<int> hosts;  // by rank, the number of its host (Hosts)
  std::string note;        // on the first rank of a host: why its ranks do not share memory, if so
};

// The smallest packet size, in bytes, that make_host_links() needs of the caller's links.
inline constexpr std::size_t kLeastGreeting = 2048;

// Returns the bytes that a rank is charged for memory shared with `ranks_here` ranks, itself included.
std::size_t host_links_bytes(int ranks_here, std::size_t ring_bytes);

// Returns a name of the host: its boot id and its process and network namespaces. So each container or
// network namespace counts as a host of its own.
std::string name_of_this_host();

// Collective: asks all ranks over the given links which host they are on, waiting for at most `patience`. The
// first rank of a host creates the shared memory, and the others open it through /proc, which the same user
// may. Where one of them cannot, all ranks of that host do without. Throws Error(kIo) where a rank is gone or
// does not answer, and Error(kCorrupt) where its answer is invalid.
HostLinks make_host_links(std::unique_ptr<Links> between, std::size_t ring_bytes,
                          std::chrono::milliseconds patience, const std::string& host = name_of_this_host());

}  // namespace sluice::comm
