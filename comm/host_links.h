#pragma once
#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "comm/links.h"

namespace sluice::comm {

// Links of ranks that need not be on one machine. Ranks of a host exchange packets through memory that they
// share (LocalMemory), and only ranks of other hosts through the links that were given.
struct HostLinks {
  std::unique_ptr<Links> links;
  int ranks_here = 1;  // how many ranks are on this host
  // How much of the cores that this rank may use is its own, by affinity: of a core that several ranks of
  // this host may use, each has an equal part.
  double share_of_cpus = 1;
  std::size_t memory = 0;  // bytes of this rank's share of the memory that is shared; 0: there is none
  bool all_here = false;   // all ranks share it: the links that were given are destroyed
  std::vector<int> hosts;  // by rank, what ranks of one host have alike (Hosts)
  std::string note;        // on the first rank of a host: why they do not share memory, if so
};

// The shortest packets over which ranks tell each other where they are.
inline constexpr std::size_t kLeastGreeting = 2048;

// What a rank holds for memory that it shares with so many ranks of its host, itself among them.
std::size_t host_links_bytes(int ranks_here, std::size_t ring_bytes);

// What ranks of one host have alike: its boot, and the namespaces of processes and networks. So a container,
// or a network namespace, is a host of its own.
std::string name_of_this_host();

// Collective: asks all ranks, over the links that are given, which host they are on, and waits for all for
// `patience` at most. Of a host, the first rank makes the memory and the others open it as a file of its
// process, which the same user may; where one cannot, all of that host go on without. Throws Error(kIo) where
// a rank is gone or does not come, and Error(kCorrupt) where what it says cannot be.
HostLinks make_host_links(std::unique_ptr<Links> between, std::size_t ring_bytes,
                          std::chrono::milliseconds patience, const std::string& host = name_of_this_host());

}  // namespace sluice::comm
