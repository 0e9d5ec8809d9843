#pragma once
#include <vector>

#include "engine/layout.h"

// Private to this room.
namespace sluice::engine {

// In which order units are summed where ranks have other units than each other (SumsInBackward). Each rank's
// units become ready in some order. An order that agrees with all of these never sums a unit before a rank
// that still comes to it. So turns follow what is known of the orders of ranks: before the first gradients of
// a step, the reverse of the order in which each rank has read units in its forward pass; afterwards, the
// order in which the units became ready. What neither tells stays as it was; at first, units that were
// declared last come first. All ranks are told the same, and so have the same turns.
class Turns {
 public:
  using OfRanks = std::vector<std::vector<UnitId>>;  // by rank

  explicit Turns(std::size_t units);
  // read: the units that each rank has read in this step, each once, in the order in which it read them
  // first.
  void begin_step(const OfRanks& read);
  // ready: the units that are ready on each rank now, which may have been ready before.
  void follow(const OfRanks& ready);
  void learn();  // takes the order in which units have become ready so far; costs a pass over all units
  void end_step();
  const std::vector<UnitId>& order() const { return order_; }

 private:
  void find_misled(const std::vector<UnitId>& read, const std::vector<UnitId>& ready);

  std::vector<UnitId> order_;
  OfRanks read_;                        // of this step
  OfRanks ready_;                       // of this step, in the order in which they became ready
  std::vector<std::vector<bool>> was_;  // by rank and unit: whether it is in ready_
  // By unit: whether on some rank it became ready in another order than its forward pass had let expect.
  std::vector<bool> misled_;
};

// All of the units of `order`, in one order that agrees with each of `orders`. Of those that may come next,
// the one comes that is first in `order`; where `orders` contradict each other, too.
std::vector<UnitId> merged(const std::vector<UnitId>& order, const Turns::OfRanks& orders);

}  // namespace sluice::engine
