#pragma once
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "engine/gradients/pairwise_gradients.h"
#include "engine/steps/core.h"
#include "engine/steps/step_of_ranks.h"
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
// Where the client states where micro-batches end, a unit's sum may begin in the last one, as soon as this
// rank adds nothing more to its gradients (end_gradients()). The sum overlaps with the client's computation,
// and owns the unit's buffer. Each rank begins such sums when it can. The end of the last micro-batch is a
// use, in which every rank joins those that it has not begun, with what it has; so is any earlier call that
// needs such a gradient. Where all ranks must begin sums in one order (UnitSums::is_in_order()), it is that
// in which rank 0 reached the units in the last step, of the units that any rank reached then; at first it is
// the reverse of their declaration. A rank that does not reach a unit begins none behind it before the end of
// its micro-batch, as with torch's DistributedDataParallel; nor does a rank after an exchange.
//
// With a reproducible plan, even without other ranks, gradients are added pairwise over the micro-batches of
// all ranks, and the mean is over these. They are used when all micro-batches of a step have ended, and
// nothing is added to them then.
class SharedGradients {
 public:
  // micro_batches: of this rank in a step; ends_micro_batches: whether the client states where each ends.
  SharedGradients(Core& core, std::size_t micro_batches, bool ends_micro_batches);
  ~SharedGradients();  // if a sum is in flight, fails all ranks

  // Adds this rank's own gradient. Throws a Refusal where a reproducible plan forbids it. REQUIRES: its unit
  // is held for gradients.
  void add(ParameterId parameter, ConstArray gradient);
  // States that this rank adds nothing more to the unit's gradients in this micro-batch. REQUIRES, for both:
  // the client states where micro-batches end.
  void end_gradients(UnitId unit);
  void end_micro_batch();
  void released(UnitId unit);  // call when the unit is no longer held for gradients
  // Call before the unit is held for gradients: completes a sum that runs in a record, without frames.
  void await_record(UnitId unit);
  std::size_t sums_of(UnitId unit) const;  // how many of its gradient buffers are in use

  // Completes the unit's sum, if it is in flight, before its gradients are dropped: by all ranks alike, or by
  // this one alone, perhaps since its backward pass has failed. In that case the other ranks, whose sums lack
  // its gradients, are refused.
  void end_sum_to_drop(UnitId unit);
  std::optional<UnitId> under_way() const;  // a unit whose sum is in flight

  // Notifications from the engine.
  void multiplied(ParameterId parameter, double factor) { known_[parameter].factor *= factor; }
  void dropped(ParameterId parameter);
  void dropped_all();
  void edited(UnitId unit) { ++edits_[unit]; }

  // Makes every gradient a shared one, if this rank has added to any.
  void use();
  // Gathers all elements of a shared gradient on every rank. Throws a Refusal where a rank has dropped it.
  void make_whole(ParameterId parameter);
  // Makes gradients shared, and returns when all ranks step with the same settings. Throws a Refusal where
  // they differ.
  void step(const StepSettings& settings);
  // Tells the other ranks, if they know of this step by an exchange or a sum. The caller drops all gradients.
  void abandon();

 private:
  enum class Request : std::uint32_t { kUse, kWhole, kStep, kDrop, kAbandon };
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
    std::vector<std::uint32_t> came;   // by unit: its number in the order of end_gradients(); 0: none
    StepOfRank step;                   // with settings, where the request is to step
  };
  void begin_micro_batches();
  bool any_added() const;
  std::vector<Report> gather(const Report& own);
  std::string bytes_of(const Report& report) const;
  Report report_in(const std::string& bytes) const;
  // Returns whether all step.
  bool exchange(Request request, const std::string& settings = {}, ParameterId wanted = 0);
  void compare(const std::vector<Report>& all) const;
  void compare_counts(const std::vector<Report>& all) const;
  void compare_micro_batches(const std::vector<Report>& all) const;
  void compare_shared(const Report& first, const Report& other, std::size_t rank) const;
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
  void begin_sum(UnitId unit);
  void begin_in_order();
  std::vector<UnitId> in_order() const;
  void learn_order(const std::vector<Report>& all);
  std::vector<ParameterId> of_unit(UnitId unit, const std::vector<bool>& added) const;
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

  Core& core_;
  UnitSums sums_;
  std::optional<PairwiseGradients> pairwise_;  // nullopt: gradients are added one after another
  const std::size_t micro_batches_;            // of this rank in a step; 0: their ends are not stated
  std::size_t ended_ = 0;  // micro-batches that have ended; unused with pairwise_, which counts them
  struct UnderWay {
    UnitId unit;
    TransferGroup group;
  };
  std::deque<UnderWay> under_way_;  // in flight; each holds its unit's gradient
  std::vector<UnitId> order_;       // of sums, where they are ordered
  std::vector<bool> expected_;  // by unit: whether it has a turn in this order; else it is behind all others
  std::size_t turn_ = 0;        // index in order_ up to which this rank has begun sums
  std::vector<std::uint32_t> came_;   // by unit: see Report
  std::uint32_t have_come_ = 0;       // how many units this rank has reached
  std::vector<Known> known_;          // by parameter
  std::size_t there_ = 0;             // how many parameters have a gradient of any kind
  std::vector<std::uint32_t> edits_;  // by unit
  bool has_exchanged_ = false;        // whether there was an exchange in this step
  bool abandoned_ = false;            // whether another rank has abandoned this step
};

}  // namespace sluice::engine
