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

// How the gradients of an AnyOrderEngine become those of all ranks where updates follow them at once. A step
// has one micro-batch on each rank. A unit is *ready* on a rank that has the gradients of all of its
// parameters that had any before, and no longer holds it, nor a unit that is updated with it.
//
// As in torch's DistributedDataParallel all ranks sum units in one order, on which they agree: before the
// first gradients it is the reverse of the order in which units were read in the first forward pass, and from
// the second step on the order in which they became ready in the first. What neither tells is in the reverse
// of the order of declaration. A rank sends a *report* when the unit whose turn it is has become ready there.
// The unit is summed when all ranks have, beside what the client computes. With the next report all ranks
// know the mean's squares, and the unit's update is due. So no more gradients exist than those of a few
// units.
//
// Ranks may have gradients of other units than each other. A rank whose micro-batch has ended has zeros for
// what it lacks. So has one on which more than kUnitsThatWait units have gradients and wait for their turn;
// it is an error if it gets a gradient after all that was summed so. A unit that becomes ready when its turn
// has passed has another one, after all others.
//
// Where updates wait for the step's end (Plan::sums_in_backward), a mean waits for it, too: this rank's part,
// where that is kept alone.
//
// Updates cannot be undone. So what ends a step in its middle, or a mean that is not finite, fails the
// engines of all ranks. Thread rule: one thread.
class SumsInBackward {
 public:
  struct Client {
    std::function<bool(UnitId)> holds;
    // The unit's gradients are the mean now, and final, and no others are waited for.
    std::function<void(UnitId)> update;
  };
  SumsInBackward(Core& core, Client client);
  ~SumsInBackward();  // a step that has begun to be applied ends the work of all ranks

  void begin_step();
  // Comes when a unit is acquired to read it, in a step.
  void follow_read(UnitId unit);
  // Throws a Refusal where the parameter has a gradient in this step that is final, or was summed already.
  void check_add(ParameterId parameter) const;
  // Comes when the unit, or one that is updated with it, is no longer held.
  void let_go(UnitId unit);
  // Ends the micro-batch: returns when all ranks have, and every gradient is summed. May come again.
  // REQUIRES: no unit is held.
  void end();
  bool has_ended() const { return all_ended_; }  // on all ranks, in this step
  // Comes before updates that have waited for the step's end. Throws a Refusal, on all ranks, where these
  // have other settings than each other, or other gradients, since one has dropped some.
  void agree(const StepSettings& settings);
  // Waits until neither the unit nor one that is updated with it is being summed.
  void await(UnitId unit);
  // Comes when the parameter's gradient was dropped. Where that was the last one of a step whose sums have
  // ended, and that waits for updates, its micro-batch begins anew.
  void dropped(ParameterId parameter);
  void abandon();  // throws Error(kState) where updates of this step were made
  void edited(UnitId unit) { ++edits_[unit]; }
  bool is_summed(UnitId unit) const;  // in this step
  // The unit that is being summed.
  std::optional<UnitId> under_way() const { return sum_ ? std::optional(sum_->unit) : std::nullopt; }

 private:
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};
  struct Report {
    bool ended = false;
    bool has_zeros = false;     // for units before `turn`
    StepOfRank step;            // with edits and settings in the first report of a step
    std::vector<UnitId> order;  // that it proposes, while no order holds for good; likewise
    // Of the first of its units that is ready, or, where it has zeros, that has a gradient; kNever: none.
    std::uint64_t turn = kNever;
    std::vector<ParameterId> parameters;  // of that unit, that have a gradient
    std::string squares;                  // of what was being summed
  };
  struct Sum {
    UnitId unit = 0;
    std::vector<ParameterId> parameters;
    TransferGroup group;
  };
  // The unit's parameters that have a gradient, which was not summed yet; none while the unit is held.
  std::vector<ParameterId> final_of(UnitId unit) const;
  bool is_complete(UnitId unit) const;  // whether it has all gradients that are expected
  void learn_expected();
  bool holds_any(UnitRange units) const;
  std::uint64_t turn_of(UnitId unit) const;
  // Units that have final gradients, by turn; without the latest one, while that may get more.
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
  // Whether a unit's parameters are held until its update is due, so that it need not wait for them.
  bool holds_parameters(UnitId unit) const {
    return !core_.plan.clip && !core_.partitions_parameters(unit) &&
           core_.queue.needs_frames(unit, core_.parameters[unit]);
  }

  Core& core_;
  const Client client_;
  UnitSums sums_;
  std::optional<Sum> sum_;  // that is under way
  std::vector<UnitId> order_;
  std::vector<std::uint64_t> place_;  // by unit, in order_
  int agreed_ = 0;                    // how often ranks have agreed on it
  std::vector<UnitId> proposed_;      // for that: the units that were read, or became ready, each once
  std::uint64_t next_ = 0;            // turns that have passed in this step; order_ comes again and again
  std::vector<UnitId> let_go_;        // that may be ready, and were not summed since
  UnitId latest_ = 0;                 // of these
  std::vector<bool> expected_;        // by parameter: whether its unit is ready only with its gradient
  bool has_learned_ = false;          // whether that is so by earlier steps; before, all are
  std::vector<bool> summed_;          // by parameter: in this step
  std::vector<std::uint32_t> edits_;  // by unit
  bool has_exchanged_ = false;        // whether there was a report in this step
  bool ended_ = false;                // whether this rank's micro-batch has
  bool all_ended_ = false;
};

}  // namespace sluice::engine
