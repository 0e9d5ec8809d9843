#pragma once
#include <cstdint>
#include <vector>

#include "core/threads.h"
#include "engine/gradients/gradients.h"
#include "engine/layout/layout.h"
#include "engine/plan/micro_batch_sums.h"

namespace sluice::engine {

// How a client without a schedule adds gradients whose sum does not depend on how many ranks there are. A
// parameter gets at most one gradient of each micro-batch, which the client counts; these pile up as on the
// stack of MicroBatchSums, in the buffers of `Gradients`. A micro-batch without a gradient of a parameter (an
// expert to which no token was sent) counts as -0, which changes no sum, so that nothing is added for it.
// Sums become one when a gradient is added, and when complete() is called, since its unit is held then.
// Thread rule: one thread.
class PairwiseGradients {
 public:
  // All arguments but `sums` outlive it.
  PairwiseGradients(const Layout& layout, MicroBatchSums sums, Gradients& gradients);

  std::size_t count() const { return sums_.count(); }  // this rank's micro-batches of a step
  std::size_t ended() const { return ended_; }         // how many of them have ended
  // Whether the micro-batch that has not ended has a gradient of the parameter.
  bool added(ParameterId parameter) const { return stacks_[parameter].pushed > ended_; }

  // REQUIRES: the unit's buffers are held, not all micro-batches have ended, and not added(parameter).
  void add(Threads& threads, ParameterId parameter, ConstArray gradient);
  void end_micro_batch() { ++ended_; }  // REQUIRES: not all have ended
  // Makes the parameter's sums those that this rank gives to the sum over ranks, whatever it has added.
  // REQUIRES: the unit's buffers are held, and all micro-batches have ended.
  void complete(Threads& threads, ParameterId parameter);
  std::size_t sums_of(UnitId unit) const;  // how many of the unit's buffers have something, from the first

  void drop(ParameterId parameter) { stacks_[parameter] = {}; }
  void begin_step();  // REQUIRES: every parameter's gradients were summed or dropped

 private:
  struct Stack {
    std::size_t pushed = 0;     // micro-batches, with those that have no gradient
    std::uint64_t present = 0;  // by height: whether the sum there has any gradient
  };
  Array at(ParameterId parameter, std::size_t height) const;
  void push(Threads& threads, ParameterId parameter, const ConstArray* gradient);
  void put(Threads& threads, ParameterId parameter, std::size_t height, ConstArray gradient);

  const Layout& layout_;
  const MicroBatchSums sums_;
  Gradients& gradients_;
  std::vector<Stack> stacks_;  // by parameter
  std::size_t ended_ = 0;
};

}  // namespace sluice::engine
