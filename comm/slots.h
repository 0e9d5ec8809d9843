#pragma once
#include <array>
#include <cstddef>
#include <deque>
#include <vector>

#include "comm/collective.h"

namespace sluice::comm {

// The slots of a communicator, and which calls wait for one, in turn. Those for the rank's own parts and
// those for what it adds for other hosts are apart: see Collective. Thread rule: the communicator's thread.
class Slots {
 public:
  static std::size_t bytes(int ranks);
  Slots(std::byte* memory, const Hosts& hosts, int rank);  // of all ranks

  // To be called when the call may want slots, or may have ceased to.
  void note(Collective& call);
  void give_back(Slot& slot) { pool(slot.use).free.push_back(&slot); }
  void hand_out();
  void stop();  // hands out none any more

 private:
  struct Pool {
    std::vector<Slot*> free;
    std::deque<Collective*> waiting;
  };
  Pool& pool(SlotUse use) { return pools_[static_cast<std::size_t>(use)]; }

  std::vector<Slot> slots_;
  std::array<Pool, 2> pools_;
};

}  // namespace sluice::comm
