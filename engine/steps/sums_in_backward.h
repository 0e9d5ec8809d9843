#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/steps/core.h"
#include "engine/steps/step_of_ranks.h"
#include "engine/steps/unit_sums.h"

// Private to this room.
namespace sluice::engine {

// Makes the gradients of an AnyOrderEngine those of all ranks where updates follow them at once. A step has
// one micro-batch per rank. A unit is *ready* on a rank when all of its parameters that had gradients before
// have them again, and the rank holds neither the unit nor one that is updated with it.
//
// As in torch's DistributedDataParallel all ranks sum units in one agreed order: before the first gradients
// it is the reverse of the order in which the first forward pass read the units, and from the second step on
// the order in which they became ready in the first. Units that neither covers come in the reverse of their
// declaration. A rank sends a *report* when the unit whose turn it is has become ready there. When all ranks
// have, the unit is summed, which overlaps with the client's computation. With the next report all ranks
// learn the squares of the mean, and the unit's update is due. So gradients of only a few units exist at a
// time.
//
// Ranks may have gradients of different units. A rank whose micro-batch has ended contributes zeros for those
// that it lacks. So does one on which more than kUnitsThatWait units have gradients and wait for their turn;
// it is an error if it then gets a gradient that was summed so. A unit that becomes ready after its turn gets
// another one, after all others.
//
// Where updates wait for the step's end (Plan::sums_in_backward), so does a mean: this rank's shard of it,
// where only that is kept.
//
// Updates cannot be undone. So a step that ends in its middle, or a mean that is not finite, fails the
// engines of all ranks. Thread rule: one thread.
class SumsInBackward {
 public:
  struct Client {
    std::function<bool(UnitId)> holds;
    // The unit's gradients are now the mean, and final.
    std::function<void(UnitId)> update;
  };
  SumsInBackward(Core& core, Client client);
  ~SumsInBackward();  // fails all ranks in the middle of a step

  void begin_step();
  // Call when a unit is acquired for reading in a step.
  void follow_read(UnitId unit);
  // Throws a Refusal where the parameter's gradient of this step is final, or was summed already.
  void check_add(ParameterId parameter) const;
  // Call when the unit, or one that is updated with it, is no longer held.
  void let_go(UnitId unit);
  // Ends the micro-batch: returns when all ranks have, and every gradient is summed. Further calls do
  // nothing. REQUIRES: no unit is held.
  void end();
  bool has_ended() const { return all_ended_; }  // on all ranks, in this step
  // Collective; before updates that have waited for the step's end. Throws a Refusal, on all ranks, where
  // these have different settings, or different gradients, since one has dropped some.
  void agree(const StepSettings& settings);
  // Waits until neither the unit nor one that is updated with it is being summed.
  void await(UnitId unit);
  // Call when the parameter's gradient was dropped. If it was the last one of a step whose sums have ended
  // and that waits for updates, its micro-batch begins anew.
  void dropped(ParameterId parameter);
  void abandon();  // throws Error(kState) where updates of this step were made
  void edited(UnitId unit) { ++edits_[unit]; }
  bool is_summed(UnitId unit) const;  // in this step
  // The unit whose sum is in flight.
  std::optional<UnitId> under_way() const { return sum_ ? std::optional(sum_->unit) : std::nullopt; }

 private:
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};
  struct Report {
    bool ended = false;
    bool has_zeros = false;     // it contributes zeros to units before `turn`
    StepOfRank step;            // with edits and settings in the first report of a step
    std::vector<UnitId> order;  // its proposal, in the first report of a step, until an order is final
    // The turn of its first unit that is ready, or, with has_zeros, that has a gradient; kNever: none.
    std::uint64_t turn = kNever;
    std::vector<ParameterId> parameters;  // of that unit, with a gradient
    std::string squares;                  // of the sum before
  };
  struct Sum {
    UnitId unit = 0;
    std::vector<ParameterId> parameters;
    TransferGroup group;
  };
  // The unit's parameters with a gradient that is not summed yet; none while the unit is held.
  std::vector<ParameterId> final_of(UnitId unit) const;
  bool is_complete(UnitId unit) const;  // whether it has all gradients that are expected
  void learn_expected();
  bool holds_any(UnitRange units) const;
  std::uint64_t turn_of(UnitId unit) const;
  // Units with final gradients, by turn; without the latest one, while that may get more.
  std::vector<UnitId> waiting() const;
  bool takes_part() const;
  bool is_next(std::uint64_t turn) const;
  Report report() const;
  void exchange();
  std::vector<Report> gather();
  Report parsed(const std::string& bytes, int rank) const;
  void compare(const Json& factors, const Json& of_first, int rank) const;
  [[noreturn]] void fail_apart(int rank) const;
  void agree(const std::vector<Report>& all);
  void take_mean(const std::vector<Report>& all);
  void begin_next(const std::vector<Report>& all);
  void begin(UnitId unit, const std::vector<ParameterId>& parameters);
  // Whether a unit's parameters are pinned until its update is due, so that it need not wait for them.
  bool holds_parameters(UnitId unit) const {
    return !core_.plan.clip && !core_.partitions_parameters(unit) &&
           core_.queue.needs_frames(unit, core_.parameters[unit]);
  }

  Core& core_;
  const Client client_;
  UnitSums sums_;
  std::optional<Sum> sum_;  // in flight
  std::vector<UnitId> order_;
  std::vector<std::uint64_t> place_;  // by unit, in order_
  int agreed_ = 0;                    // how often ranks have agreed on order_
  std::vector<UnitId> proposed_;  // for the next agreement: units that were read, or became ready, each once
  std::uint64_t next_ = 0;        // turns that have passed in this step; order_ repeats
  std::vector<UnitId> let_go_;    // units that may be ready, and were not summed since
  UnitId latest_ = 0;             // the latest of them
  std::vector<bool> expected_;    // by parameter: its unit is ready only with its gradient
  bool has_learned_ = false;      // expected_ comes from earlier steps; before, all are expected
  std::vector<bool> summed_;      // by parameter: in this step
  std::vector<std::uint32_t> edits_;  // by unit
  bool has_exchanged_ = false;        // whether there was a report in this step
  bool ended_ = false;                // this rank's micro-batch has ended
  bool all_ended_ = false;
};

}  // namespace sluice::engine
