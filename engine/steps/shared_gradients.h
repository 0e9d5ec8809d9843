#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "engine/gradients/pairwise_gradients.h"
#include "engine/steps/core.h"
#include "engine/steps/step_of_ranks.h"
#include "engine/steps/turns.h"
#include "engine/steps/unit_sums.h"

// Private to this room.
namespace sluice::engine {

// Makes the gradients of an AnyOrderEngine those of all ranks. Each rank adds its own to a parameter. At
// their first use they are summed over the ranks and divided by the number of ranks, and are *shared* from
// then on: the same bits on every rank. Where state is partitioned, a rank gets only its own shard of the
// sums, which its updates need (a reduce-scatter), and all ranks learn the squares; a call that needs all
// elements gathers them. Ranks use gradients at different times, and one may use a gradient that the others
// do not. So a use is an *exchange* of reports: every rank reports its request (use gradients, make one
// whole, step, drop, abandon the step) and what it has added; then all ranks gather what any of them requests
// whole, or else sum what any of them has added. A rank reports again until its request is met; one that
// steps, until all step. Each exchange compares what must not differ between ranks, and refuses a difference
// on all of them. Thread rule: one thread.
//
// A rank adds to a shared gradient as to its own, once it has all of it. The next mean is then the shared
// gradient plus the mean of what the ranks have added, as with torch's DistributedDataParallel.
//
// A unit's sum may begin before, and overlap with the client's computation. It owns the unit's buffer, and
// takes the whole unit: a rank contributes zeros for what it lacks. The end of the last micro-batch is a use,
// in which every rank joins the sums that it has not begun, with what it has; so is any earlier call that
// needs such a gradient. Where all ranks must begin sums in one order, it is that of Turns; a rank that does
// not come to a unit begins none behind it before the end of its micro-batch, nor does a rank after an
// exchange. There are two ways:
//
// - Where the client states where micro-batches end, the sum of a unit begins in the last one, as soon as
//   this rank adds nothing more to its gradients (end_gradients()), and goes on until gradients are used.
//
// - *In backward*, where updates follow gradients at once, or a rank keeps its own part of the means alone
//   (Plan::sums_in_backward): gradients of only a few units exist at a time. A step has one micro-batch per
//   rank, unless means are added to the parts (Plan::sums_each_backward), which makes the written order one
//   over ranks, and then over micro-batches. What is said of a step is then true of each micro-batch. A unit
//   *waits* for its turn when nobody holds it, or one that is updated with it; its turn is used when all of
//   its parameters have gradients that had any in an earlier step (at first, simply all). Before the next sum
//   begins, or where more than kUnitsThatWait units wait on a rank, the sum in flight is *concluded*: all
//   ranks learn which of its parameters have a gradient on any rank, and the squares of the mean, which is
//   then applied or kept. They also learn of units that wait on any rank and have no turn, which get one. A
//   rank on which too many units wait then contributes zeros to the next unit. If another rank had a gradient
//   of it, it is an error that this one gets one later; else the unit gets another turn. In the first step
//   units have their turns in the reverse of the order in which rank 0 read them. Updates cannot be undone.
//   So a step that ends in its middle, or a mean that is not finite, fails the engines of all ranks.
//
// With a reproducible plan, even without other ranks, gradients are added pairwise over the micro-batches of
// all ranks, and the mean is over these. They are used when all micro-batches of a step have ended, and
// nothing is added to them then.
class SharedGradients {
 public:
  struct Client {
    std::function<bool(UnitId)> holds;  // whether the client holds the unit, for whatever purpose
    // In backward, where the plan does not clip: the unit's gradients are now the mean, and final.
    std::function<void(UnitId)> update;
  };
  // micro_batches: of this rank in a step; ends_micro_batches: whether the client states where each ends.
  SharedGradients(Core& core, std::size_t micro_batches, bool ends_micro_batches, Client client);
  // Fails all ranks if a sum is in flight, or, in backward, a step.
  ~SharedGradients();

  bool in_backward() const { return in_backward_; }

  // Notifications from the engine.
  void begin_step();
  void read(UnitId unit);                       // it is acquired for reading, in a step
  void await(UnitId unit, bool for_gradients);  // call before it is acquired
  void released(UnitId unit);
  void multiplied(ParameterId parameter, double factor) { known_[parameter].factor *= factor; }
  void dropped(ParameterId parameter);
  void dropped_all();
  void edited(UnitId unit) { ++edits_[unit]; }

  // Adds this rank's own gradient. Throws a Refusal where a reproducible plan forbids it, and, in backward,
  // where the gradient was summed already. REQUIRES: its unit is held for gradients.
  void add(ParameterId parameter, ConstArray gradient);
  // States that this rank adds nothing more to the unit's gradients in this micro-batch. REQUIRES, for both:
  // the client states where micro-batches end.
  void end_gradients(UnitId unit);
  void end_micro_batch();
  // With a reproducible plan: see AnyOrderEngine.
  void set_micro_batch(std::size_t number);
  std::size_t sums_of(UnitId unit) const;  // how many of its gradient buffers are in use
  bool is_summed(UnitId unit) const;       // in backward: whether all of its gradients are

  // Completes the unit's sum, if it is in flight, before its gradients are dropped: by all ranks alike, or by
  // this one alone, perhaps since its backward pass has failed. In that case the other ranks, whose sums lack
  // its gradients, are refused.
  void end_sum_to_drop(UnitId unit);
  std::optional<UnitId> under_way() const;  // a unit whose sum is in flight

  // Makes every gradient a shared one, if this rank has added to any. Throws a Refusal, in backward, before
  // this rank's micro-batch has ended.
  void use();
  // Gathers all elements of a shared gradient on every rank. Throws a Refusal where a rank has dropped it.
  void make_whole(ParameterId parameter);
  // Makes gradients shared, and returns when all ranks step with the same settings. Throws a Refusal where
  // they differ.
  void step(const StepSettings& settings);
  // Tells the other ranks, if they know of this step by an exchange or a sum. The caller drops all gradients.
  // In backward it throws Error(kState) then.
  void abandon();

 private:
  // kOpen and kMean, in backward: a step's first exchange, and one that concludes a sum.
  enum class Request : std::uint32_t { kUse, kWhole, kStep, kDrop, kAbandon, kOpen, kMean };
  // The elements of which a rank has the sum over all ranks.
  enum class Sum : std::uint32_t { kNone, kOwnShard, kWhole };
  struct Known {
    std::uint32_t added = 0;  // how often this rank has added to it since it was shared
    Sum shared = Sum::kNone;  // of a shared gradient; kWhole, where it has added to that
    double factor = 1;        // of the shared gradient
    bool is_shared() const { return shared != Sum::kNone; }
    bool operator==(const Known&) const = default;
  };
  struct Report {
    Request request = Request::kUse;
    std::uint64_t wanted = 0;          // the parameter whose gradient is requested whole
    std::uint64_t micro_batches = 0;   // that have ended
    std::vector<Known> known;          // by parameter
    std::vector<std::uint32_t> begun;  // by unit: whether its sum is in flight
    std::vector<std::uint32_t> came;   // by unit: see Turns; in a step's first exchange, units that were read
    StepOfRank step;                   // with settings, where the request is to step
  };
  // A rank's report of a sum that is concluded.
  struct Mean {
    // With a gradient on this rank: parameters that were summed, and ones that have no turn.
    std::vector<ParameterId> parameters;
    std::vector<ParameterId> kept;  // of those that were summed: with a gradient of an earlier micro-batch
    std::string squares;            // of its shard of the mean, where the update follows
  };
  struct UnderWay {
    UnitId unit;
    std::vector<ParameterId> parameters;
    TransferGroup group;
  };

  // The exchanges, in shared_gradients_report.cc.
  std::vector<std::string> tell(Request request, const std::string& what) const;
  std::vector<Report> gather(Request request, const std::string& settings, ParameterId wanted = 0);
  std::vector<Mean> gather(const Mean& own) const;
  std::string bytes_of(const Report& report) const;
  Report report_in(const std::string& bytes) const;
  void compare(const std::vector<Report>& all) const;
  void compare_counts(const std::vector<Report>& all) const;
  void compare_micro_batches(const std::vector<Report>& all) const;
  void compare_shared(const Report& first, const Report& other, std::size_t rank) const;

  void begin_micro_batches();
  bool any_added() const;
  // Returns whether all step.
  bool exchange(Request request, const std::string& settings = {}, ParameterId wanted = 0);
  void refuse_lone_drop(const std::vector<Report>& all);
  void gather_wanted(const std::vector<Report>& all);
  void gather_whole(ParameterId parameter);
  bool is_under_way(UnitId unit) const;
  // Whether its buffer is in frames, of which the plan has enough for one such sum at a time.
  bool is_alone(UnitId unit) const {
    return !core_.plan.units[unit].resident(Part::kGradient) && !sums_.is_in_record(unit);
  }
  void finish_sum_of(UnitId unit) {
    if (is_under_way(unit)) use();
  }
  bool may_begin(UnitId unit) const;
  void begin_in_order();
  void learn_turns(const std::vector<Report>& all);
  std::vector<ParameterId> all_of(UnitId unit) const;
  std::vector<ParameterId> of_unit(UnitId unit, const std::vector<bool>& added) const;
  std::vector<bool> added_in(const std::vector<Report>& all) const;
  void sum(const std::vector<Report>& all);
  void begin_sum(UnitId unit, const std::vector<ParameterId>& parameters);
  void finish_sums(const std::vector<bool>& added);
  void finish(UnitId unit, const std::vector<ParameterId>& parameters);
  void drain(const std::vector<Report>& all);
  void drop_begun(const std::vector<Report>& all);
  void end_sums();
  std::vector<UnitId> begun_in(const std::vector<Report>& all) const;
  void bring_nothing(ParameterId parameter);
  void set(ParameterId parameter, const Known& known);

  // Sums in backward, in sums_in_backward.cc.
  void begin_in_backward();
  void check_add(ParameterId parameter);
  void note_release(UnitId unit);
  bool holds_any(UnitRange units) const;
  bool is_complete(UnitId unit) const;
  std::vector<ParameterId> final_of(UnitId unit) const;
  std::vector<UnitId> waiting() const;
  void open();
  void give_turns(const std::vector<bool>& added);
  void sum_in_turn();
  bool tell_of_waiting();
  void begin_turn(UnitId unit);
  void conclude();
  void take_mean(const UnderWay& sum, const std::vector<Mean>& all);
  void keep_or_apply(UnitId unit, bool is_empty, const std::vector<GradientParts::Mean>& means);
  void end_in_backward();
  void abandon_in_backward() const;
  // Whether a unit's parameters are pinned until its update is due, so that it need not wait for them.
  bool holds_parameters(UnitId unit) const {
    return !core_.plan.clip && !core_.partitions_parameters(unit) &&
           core_.queue.needs_frames(unit, core_.parameters[unit]);
  }

  Core& core_;
  const Client client_;
  const bool in_backward_;
  UnitSums sums_;
  std::optional<PairwiseGradients> pairwise_;  // nullopt: gradients are added one after another
  const std::size_t micro_batches_;            // of this rank in a step; 0: their ends are not stated
  std::size_t ended_ = 0;           // micro-batches that have ended; unused with pairwise_, which counts them
  std::deque<UnderWay> under_way_;  // in flight; each holds its unit's gradient
  Turns turns_;
  std::vector<Known> known_;          // by parameter
  std::size_t there_ = 0;             // how many parameters have a gradient of any kind
  std::vector<std::uint32_t> edits_;  // by unit
  bool has_exchanged_ = false;        // whether there was an exchange in this step
  bool abandoned_ = false;            // whether another rank has abandoned this step
  // In backward alone.
  bool all_ended_ = false;          // the micro-batches of all ranks have ended
  std::vector<UnitId> let_go_;      // units that may wait for their turn, and were not summed since
  UnitId latest_ = 0;               // the latest of them
  std::vector<bool> expected_;      // by parameter: its unit comes only with its gradient
  std::vector<bool> has_learned_;   // by unit: expected_ comes from earlier steps; before, all are expected
  std::vector<bool> summed_;        // by parameter: in this micro-batch, or kept from an earlier step
  std::vector<ParameterId> means_;  // those of the micro-batch that are kept, in the order of their sums
};

}  // namespace sluice::engine
