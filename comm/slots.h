#pragma once
#include <array>
#include <cstddef>
#include <deque>
#include <vector>

#include "comm/collective.h"

namespace sluice::comm {

// The slots of a communicator, and the queues of calls that wait for one. Slots for the rank's own parts and
// slots for relayed blocks are separate pools: see Collective. Thread rule: the communicator's thread.
class Slots {
 public:
  static std::size_t bytes(int ranks);
  Slots(std::byte* memory, const Hosts& hosts, int rank);  // hosts of all ranks in the run

  // Enqueues or dequeues the call. To be called whenever the call may have begun or ceased to want slots.
  void note(Collective& call);
  void give_back(Slot& slot) { pool(slot.use).free.push_back(&slot); }
  void hand_out();
  void stop();  // hands out no more slots

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
