#pragma once
#include <cstddef>
#include <memory>

#include "comm/links.h"

namespace sluice::comm {

// The memory through which the ranks of one machine exchange packets: a ring from each rank to each other,
// and a bell for each rank. It belongs to no name in any file system, so that nothing is left behind whatever
// is killed, and only processes that were given its descriptor can open it. Its maker charges bytes() to the
// ledger. Thread rule: any thread.
class LocalMemory {
 public:
  static constexpr int kMostRanks = 64;
  static constexpr std::size_t kLeastRing = std::size_t{4} << 10;
  // How many bytes of memory the rings between `ranks` ranks take in all.
  static std::size_t bytes(int ranks, std::size_t ring_bytes);

  // Makes the memory: for threads of this process, or (with descriptor()) for processes that it starts.
  // ring_bytes: of one ring, a multiple of a page. Throws Error(kInvalidArgument | kIo).
  LocalMemory(int ranks, std::size_t ring_bytes);
  // Opens memory that another process has made. Takes the descriptor, also where it throws: Error(kIo |
  // kCorrupt) where it is not such memory.
  explicit LocalMemory(int descriptor);
  ~LocalMemory();
  LocalMemory(const LocalMemory&) = delete;
  LocalMemory& operator=(const LocalMemory&) = delete;

  int ranks() const;
  int descriptor() const;  // stays this object's; is closed on exec()

  // States that a rank has ended, or never began: its links are gone for all others. Called by the rank's
  // own links when they are destroyed, and by the process that sees another one end.
  void leave(int rank, bool in_order);

 private:
  friend class LocalLinks;
  struct Map;
  std::unique_ptr<Map> map_;
};

// The links of one rank over that memory, which outlives them. Throws Error(kState) where the rank has links
// already, or has left. A rank counts as gone when leave() was called for it, or its process has ended
// without that. (A process counts as alive while a child lives that it forked after it made the links, and
// that has not called exec(). Such a rank is found by its silence.)
std::unique_ptr<Links> make_local_links(LocalMemory& memory, int rank);

}  // namespace sluice::comm
