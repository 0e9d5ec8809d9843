#pragma once
#include <cstdint>
#include <vector>

#include "core/threads.h"
#include "engine/gradients/gradients.h"
#include "engine/layout/layout.h"
#include "engine/plan/micro_batch_sums.h"

namespace sluice::engine {

// Adds the gradients of a client without a schedule such that the sum does not depend on how many ranks there
// are. A parameter gets at most one gradient per micro-batch, which the client counts; these form the stack
// of MicroBatchSums, in the buffers of `Gradients`. A micro-batch without a gradient of a parameter (an
// expert to which no token was sent) counts as -0, which changes no sum, so that nothing is added for it.
// Sums are merged when a gradient is added and in complete(), since the unit is held then. Thread rule: one
// thread.
class PairwiseGradients {
 public:
  // All arguments but `sums` outlive it.
  PairwiseGradients(const Layout& layout, MicroBatchSums sums, Gradients& gradients);

  std::size_t count() const { return sums_.count(); }  // this rank's micro-batches per step
  std::size_t ended() const { return ended_; }         // micro-batches that have ended
  // Whether the current micro-batch has a gradient of the parameter.
  bool added(ParameterId parameter) const { return stacks_[parameter].pushed > ended_; }

  // REQUIRES: the unit's buffers are held, not all micro-batches have ended, and not added(parameter).
  void add(Threads& threads, ParameterId parameter, ConstArray gradient);
  void end_micro_batch() { ++ended_; }  // REQUIRES: not all have ended
  // For a client whose micro-batches overlap: gradients are of this one from now on. A parameter gets its
  // gradients in ascending order. REQUIRES: number <= count(), which means that all have ended.
  void set_micro_batch(std::size_t number) { ended_ = number; }
  // Completes the parameter's sums that this rank contributes to the sum over ranks, whatever it has added.
  // REQUIRES: the unit's buffers are held, and all micro-batches have ended.
  void complete(Threads& threads, ParameterId parameter);
  std::size_t sums_of(UnitId unit) const;  // how many of the unit's buffers are in use, from the first

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
