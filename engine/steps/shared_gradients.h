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

// How the gradients of an AnyOrderEngine become those of all ranks. Each rank adds its own to a parameter. At
// their first use they are summed over the ranks and divided by the number of ranks, and are *shared* from
// then on: the same bits on every rank. Where state is partitioned, a rank gets the sums of its own shard
// alone, which its updates need; of the whole gradient all know the squares. Who needs all elements has them
// gathered. Ranks use gradients at different times, and one may use one that the others do not. So a use is
// an *exchange* of reports: every rank reports its request (to use gradients, to have one whole, to step, to
// abandon the step) and what it has added; then all of them gather what any of them requests whole, or else
// sum what any of them has added. A rank reports again until its request is met; one that steps, until all
// step. What can differ between ranks is compared in each exchange, and refused on all of them.
// Thread rule: one thread.
//
// To a shared gradient each rank adds as to its own, when it has all of it, and the mean of what ranks have
// then is the shared gradient and the mean of what they have added, as with torch's DistributedDataParallel.
//
// Where the client says where micro-batches end, a unit's sum may begin in the last one, as soon as this rank
// adds nothing more to its gradients (end_gradients()). It goes on beside what the client computes, and the
// unit's buffer belongs to it. Each rank begins such sums when it can, and the end of the last micro-batch is
// a use, in which every rank joins those that it has not begun, with what it has. So is any earlier call that
// needs the gradient of such a unit. Where all ranks must begin sums in one order (UnitSums::is_in_order()),
// it is that in which rank 0 came to them in the last step, of the units that any rank came to then; at first
// the reverse of that in which they are declared. A rank that does not come to one begins none of those
// behind it before the end of its micro-batch, as with torch's DistributedDataParallel; nor after an
// exchange.
//
// With a reproducible plan, also where an engine trains alone, gradients are added pairwise over the
// micro-batches of all ranks, and the mean is over these. They are used when all micro-batches of a step have
// ended, and nothing is added to them then.
class SharedGradients {
 public:
  // micro_batches: of this rank in a step; ends_micro_batches: whether the client says where each ends.
  SharedGradients(Core& core, std::size_t micro_batches, bool ends_micro_batches);
  ~SharedGradients();  // a sum that is under way ends the work of all ranks

  // Adds this rank's own gradient. Throws a Refusal where a reproducible plan allows none. REQUIRES: its unit
  // is held for gradients.
  void add(ParameterId parameter, ConstArray gradient);
  // Says that this rank adds nothing more to the unit's gradients in this micro-batch. REQUIRES, for both:
  // the client says where micro-batches end.
  void end_gradients(UnitId unit);
  void end_micro_batch();
  void released(UnitId unit);  // comes when the unit is no longer held for gradients
  // Comes before the unit is held for gradients: in a record, where it has no frames, a sum ends first.
  void await_record(UnitId unit);
  std::size_t sums_of(UnitId unit) const;  // how many of its gradient buffers have something

  // Ends the unit's sum, if it is under way, before its gradients are dropped: by all ranks alike, or by this
  // one alone, whose backward pass has failed perhaps. The others have what it will never complete then, and
  // are refused.
  void end_sum_to_drop(UnitId unit);
  std::optional<UnitId> under_way() const;  // a unit whose sum is

  // What the engine tells.
  void multiplied(ParameterId parameter, double factor) { known_[parameter].factor *= factor; }
  void dropped(ParameterId parameter);
  void dropped_all();
  void edited(UnitId unit) { ++edits_[unit]; }

  // Makes every gradient a shared one, where this rank has added any.
  void use();
  // Brings all elements of a shared gradient to every rank. Throws a Refusal where one has dropped it.
  void make_whole(ParameterId parameter);
  // Does the same, and returns when all ranks step, with the same settings. Throws a Refusal where they
  // differ.
  void step(const StepSettings& settings);
  // Tells the others where they know of this step. The caller drops all gradients.
  void abandon();

 private:
  enum class Request : std::uint32_t { kUse, kWhole, kStep, kDrop, kAbandon };
  // Of which elements a rank has the sum of all ranks.
  enum class Sum : std::uint32_t { kNone, kOwnShard, kWhole };
  struct Known {
    std::uint32_t added = 0;  // how often this rank has added to it since it was shared
    Sum shared = Sum::kNone;  // what it has of a shared gradient; all, where it has added to that
    double factor = 1;        // of the shared gradient
    bool is_shared() const { return shared != Sum::kNone; }
    bool operator==(const Known&) const = default;
  };
  struct Report {
    Request request = Request::kUse;
    std::uint64_t wanted = 0;          // the parameter whose gradient is requested whole
    std::uint64_t micro_batches = 0;   // how many have ended
    std::vector<Known> known;          // by parameter
    std::vector<std::uint32_t> begun;  // by unit: whether its sum is under way
    std::vector<std::uint32_t> came;  // by unit, when this rank came to it: as the first, second, ...; 0: not
    StepOfRank step;                  // with settings, where the request is to step
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
  // Whether its buffer is under frames, which are held alone.
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
  std::optional<PairwiseGradients> pairwise_;  // nothing: each rank's gradients are added one after another
  const std::size_t micro_batches_;            // of this rank in a step; 0: it is not said where they end
  std::size_t ended_ = 0;                      // how many have ended; with pairwise_, that knows it
  struct UnderWay {
    UnitId unit;
    TransferGroup group;
  };
  std::deque<UnderWay> under_way_;  // sums, each of which holds its unit's gradient
  std::vector<UnitId> order_;       // of sums, where they are in order
  std::vector<bool> expected_;      // by unit: whether it has a turn in this order, or else behind all others
  std::size_t turn_ = 0;            // of order_: up to where this rank has begun sums
  std::vector<std::uint32_t> came_;   // by unit: see Report
  std::uint32_t have_come_ = 0;       // how many units
  std::vector<Known> known_;          // by parameter
  std::size_t there_ = 0;             // how many parameters have a gradient, of which kind ever
  std::vector<std::uint32_t> edits_;  // by unit
  bool has_exchanged_ = false;        // whether there was an exchange in this step
  bool abandoned_ = false;            // whether another rank has abandoned this step
};

}  // namespace sluice::engine
