#pragma once
#include <cstddef>
#include <memory>

#include "comm/links.h"

namespace sluice::comm {

// Shared memory through which the ranks of one machine exchange packets: a ring from each rank to each other
// one, and a bell (a futex) for each rank. It has no name in any file system, so that a killed process leaves
// nothing behind, and only processes that get its descriptor can open it. Its maker charges bytes() to the
// ledger. Thread rule: any thread.
class LocalMemory {
 public:
  static constexpr int kMostRanks = 64;
  static constexpr std::size_t kLeastRing = std::size_t{4} << 10;
  // Returns the total bytes of all rings and bells among `ranks` ranks.
  static std::size_t bytes(int ranks, std::size_t ring_bytes);

  // Creates the memory, for threads of this process or (by descriptor()) for child processes. ring_bytes is
  // the size of one ring, a multiple of a page. Throws Error(kInvalidArgument | kIo).
  LocalMemory(int ranks, std::size_t ring_bytes);
  // Maps memory that another process has created. Takes ownership of the descriptor, even when it throws.
  // Throws Error(kIo), or Error(kCorrupt) where the descriptor is not of such memory.
  explicit LocalMemory(int descriptor);
  ~LocalMemory();
  LocalMemory(const LocalMemory&) = delete;
  LocalMemory& operator=(const LocalMemory&) = delete;

  int ranks() const;
  int descriptor() const;  // owned by this object; close-on-exec

  // Marks a rank as gone, so that its links end for all others. The rank's own links call it when they are
  // destroyed, and so does a process that sees another rank's process end.
  void leave(int rank, bool in_order);

 private:
  friend class LocalLinks;
  struct Map;
  std::unique_ptr<Map> map_;
};

// Makes the links of one rank over the memory, which outlives them. Throws Error(kState) where the rank has
// links already or has left. A rank counts as gone once leave() was called for it or its process has ended.
// (A process counts as alive while a child lives that it forked after making the links and that has not
// called exec(). Such a rank is detected by its silence.)
std::unique_ptr<Links> make_local_links(LocalMemory& memory, int rank);

}  // namespace sluice::comm
