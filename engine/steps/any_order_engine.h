#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "allocator/memory.h"
#include "engine/steps/engine.h"
#include "engine/steps/recorder.h"

namespace sluice::engine {

class SharedGradients;

// The purpose for which a client acquires a unit.
enum class Hold : std::uint8_t {
  kRead,          // to read parameters
  kGradient,      // to read parameters and add gradients; only within a step, and not for a frozen unit
  kGradientOnly,  // to add gradients; parameters need not be present
  // To write parameters in place, which become the unit's values at release. Masters change only for elements
  // that were changed.
  kEdit,
};
constexpr bool with_parameters(Hold hold) { return hold != Hold::kGradientOnly; }
constexpr bool with_gradient(Hold hold) { return hold == Hold::kGradient || hold == Hold::kGradientOnly; }

// An engine whose client (a wrapped model) acquires units in any order, several at once, and outside of steps
// for reading. The engine records the order of a step, by which it prefetches in the next one. A step is
// begin_step(); then acquire(), add_gradient() and release() as often as needed; then step() or
// abandon_step(). step() takes the settings and makes gradients final; a parameter without a gradient is not
// updated. Where the plan does not clip, a unit's gradients are final when nobody holds the unit any more,
// and are applied at once with the settings of begin_step(). Each parameter then gets at most one gradient
// per step, and release() throws Error(kNotFinite), leaving the unit as it was. A GPU reports such a gradient
// later: step() throws, after other units were updated (but a factor that is not finite is known at once).
// Where the optimizer has rounds for a parameter that spans units, these units are updated jointly, when all
// their gradients are final; step() refuses where only some of them have gradients. Parameters are accessible
// at their address only while their unit is held, and writable only while it is held for editing; any other
// access is a page fault (see allocator::TouchServer). Values may be loaded and saved within a step, but a
// held unit cannot be loaded.
//
// With several ranks, each adds its own gradients. A gradient becomes the mean over all ranks at its first
// use, by step(), read_gradient(), multiply_gradient() or gradient_norm(), which then wait until every other
// rank uses gradients, too. Gradients that a rank adds later are averaged at the next use and added to the
// mean. Where state is partitioned, a rank has only its own shard of the means: read_gradient(), and adding
// to a gradient that was used or kept, wait until the others use gradients, and gather that gradient on all
// ranks. All ranks must step alike: a difference is a Refusal on all of them. A rank may acquire units alone,
// but must edit them as all ranks do; where parameters are partitioned, the end of an edit waits for the
// others. Where state is partitioned, step() completes the updates, so that no rank needs another one outside
// of a step.
//
// Where the client states where micro-batches end (Profile::ends_micro_batches), sums over ranks overlap with
// the last micro-batch of a step: see end_gradients().
//
// With several ranks and a plan that does not clip, a unit's gradients are summed over the ranks when nobody
// holds the unit any more, in an order that the ranks agree on (see SharedGradients), and its update follows
// at once. A step then has one micro-batch per rank, which end_micro_batch() or step() ends, and gradients
// cannot be read or multiplied. A mean that is not finite, or a step that is abandoned after its first sums,
// fails the engines of all ranks.
//
// Where a plan clips and sums in backward (Plan::sums_in_backward), gradients are summed in the same way, and
// a rank keeps its own part of the means until the step, which cannot be read. A step has one micro-batch per
// rank, or, with Plan::sums_each_backward, several: means are then added to the parts.
//
// With a reproducible plan a gradient is the mean over all micro-batches of the step, with the same bits at
// any number of ranks. Each rank ends Profile::micro_batches of them in a step before gradients are used,
// adds at most one gradient of a parameter in each, and adds nothing to gradients that were used.
class AnyOrderEngine final : public Engine {
 public:
  // Takes all memory and disk space of the plan, as Engine() does. Throws Error(kInvalidArgument) for a
  // reproducible plan that does not clip, and for several ranks that sum gradients in backward and have more
  // than one micro-batch each in a step.
  AnyOrderEngine(const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer,
                 const Resources& resources);
  ~AnyOrderEngine() override;

  // Queries, which never wait.
  std::vector<Hold> holds(UnitId unit) const;  // in the order of acquisition, without holds for page faults
  // Each unit once, in the order of acquisition, without holds for page faults.
  std::vector<UnitId> held_units() const;
  bool has_gradient(ParameterId parameter) const;  // of this step, or kept from an earlier one
  bool left() const { return left_; }
  // The unit whose address range contains the address.
  std::optional<UnitId> unit_at(const std::byte* address) const;

  // On a GPU: sets the stream on which the client queues its work with parameters and gradients from now on.
  // The stream outlives the engine, or its use until the next call. The GPU begins such work when the unit is
  // present, and touches the unit again only after the work that was queued before release(); the client's
  // thread waits for neither. While the stream is captured into a CUDA graph, calls that may queue work or
  // wait throw Error(kState) and change nothing: a replay repeats what was captured, but units move
  // differently each time. Calls that do neither stay allowed: begin_step(); set_steps() where no gradients
  // were added that are applied in backward; end_gradients(); multiply_gradient() and end_micro_batch()
  // without other ranks; drop_gradient() and release_touched() where there is nothing to drop or release; and
  // queries. Other streams may be captured at any time, but only non-blocking ones if the client's stream is
  // CUDA's default one. The engine may also be destroyed during a capture, if no unit is held.
  void use_stream(CUstream_st* stream);

  void begin_step(const StepSettings& settings);
  // A unit is held until it was released as often as it was acquired.
  void acquire(UnitId unit, Hold hold);
  void release(UnitId unit);  // ends the unit's latest hold
  // Adds to the parameter's gradient of this step. REQUIRES: its unit is held for gradients.
  void add_gradient(ParameterId parameter, ConstArray gradient);
  // For a client that states where micro-batches end (Profile::ends_micro_batches): this rank adds nothing
  // more to the unit's gradients in this micro-batch. In a step's last one this begins their sum over the
  // ranks, where the gradients are in memory.
  void end_gradients(UnitId unit);
  // Ends a micro-batch: see SharedGradients. With several ranks the end of a step's last one is a use of all
  // gradients, unless the plan is reproducible.
  void end_micro_batch();
  // Says of which micro-batch of this rank, from 0, the gradients are that are added from now on. It takes
  // the place of end_micro_batch() where a client's micro-batches overlap, as in a stage of a pipeline, and
  // needs a reproducible plan. Each parameter gets its gradients in ascending order. If `number` is how many
  // micro-batches this rank has, all of them have ended.
  void set_micro_batch(std::size_t number);
  // Ends the step. Throws Error(kNotFinite) that names a parameter whose gradient is not finite, or the norm;
  // the step is then over, and where the plan clips, no parameter was changed.
  StepResult step(const StepSettings& settings);
  // Ends the step without an update, drops its gradients and releases every unit. The other ranks must
  // abandon it, too, or this rank must repeat it.
  void abandon_step();

  // These calls work at any time on the gradient of a parameter, and throw Error(kState) where there is none.
  // Only read_gradient() brings elements into memory: the norm (NaN where an element is NaN, else infinite
  // where one is) is known already, and a factor is applied when the gradient is used. A factor that is given
  // while an update is pending does not change that update.
  void read_gradient(ParameterId parameter, Array out);  // out: [elements]; waits for a pending update
  void multiply_gradient(ParameterId parameter, double factor);
  double gradient_norm(ParameterId parameter);
  void drop_gradient(ParameterId parameter);  // allowed where there is none

  // The server receives page faults on absent parameters and calls touch(), which brings the unit in for
  // reading, or also for writing, and holds it until release_touched(). Where that needs room, units that are
  // held for earlier page faults are released, the oldest first.
  void serve_touches(allocator::TouchServer& server) const;
  void touch(UnitId unit, bool write);
  void release_touched();

  // Shutdown. `take` gets each unit's address range, which outlives the engine. With values, pending updates
  // are applied, and the values stay at their addresses in ordinary memory, for which the engine frees its
  // own step by step. Without values the ranges have no memory, and the engine may have failed before.
  // Afterwards only the destructor and queries may be called. After an error, the remaining units leave
  // without values. REQUIRES, with values: no unit is held. Where parameters are partitioned, all ranks leave
  // together.
  void leave(bool with_values, const std::function<void(UnitId, allocator::FormerHome)>& take);
  // The most bytes by which the process grows while all units leave with values; negative: it shrinks.
  std::int64_t growth_of_leaving() const;

  // Applies another plan, between steps. Values, state and addresses stay; parts with another tier move, and
  // memory never exceeds that of the larger plan. Nothing changes on Error(kBudget), where the disk has no
  // space for what leaves memory, or on Error(kState), where a unit is held, has no values, or has a
  // gradient. REQUIRES: the plan was made for the same profile, optimizer, chunks, clipping and stages.
  void replan(const Plan& plan);

 private:
  struct Held {
    UnitId unit;
    Hold hold;
    bool touched;  // held to serve a page fault
  };
  using HeldIterator = std::vector<Held>::const_iterator;
  void check_load(UnitId unit) const override;
  void check_save(UnitId unit) const override;
  void learn_of_refused() override;
  void check_queuing(const char* what) const override;
  void check_acquire(UnitId unit, Hold hold) const;
  void check_held_units(UnitId wanted) const;
  void check_replan(const Plan& next) const;
  void require_none_held(const char* what) const;
  // stream: the one that must not be captured; nullopt: the client's.
  void require_no_capture(const char* what, std::optional<UnitId> unit,
                          std::optional<CUstream_st*> stream = {}) const;
  void require_gradient(ParameterId parameter) const;
  void require_micro_batches(const char* what) const;
  void require_all_or_none() const;  // a joint update's units must all have gradients, or none
  bool is_held(UnitId unit) const;
  bool is_held_for_gradients(UnitId unit) const;
  HeldIterator oldest_touched() const;

  void make_sums(const Profile& profile);
  void take(const Held& wanted);
  void let_go(HeldIterator at);
  void take_edited(UnitId unit);
  void share_edited(UnitId unit);
  bool has_parts() const;  // whether any unit's state is partitioned
  void release_gradient(UnitId unit);
  void discard_unless_needed(UnitId unit);
  void drop_all_gradients();
  bool have_final_gradients(UnitRange units) const;
  void follow_final_gradients(UnitId unit);
  void refuse_own_gradient(const char* what) const;
  void use_gradients();
  void update_at_once(UnitRange units);  // REQUIRES: their gradients are final
  void await_update(UnitId unit, bool from_record);
  [[noreturn]] void refuse_at_once(UnitRange units, ParameterId bad);
  void refuse_what_the_gpu_refused();
  StepResult update_all(const std::vector<Access>& accesses, const StepSettings& settings);
  std::vector<UnitRange> units_to_update(const std::vector<Access>& accesses) const;

  std::size_t most_held_;
  bool ends_micro_batches_;
  std::vector<Held> held_;  // in the order of acquisition
  Recorder recorder_;
  std::vector<bool> updated_;  // by parameter: whether this step has updated it
  // The parameters whose gradients a GPU has found not finite in this step: the first one of each unit.
  std::vector<ParameterId> refused_;
  std::vector<bool> changed_;  // by unit: whether gradients were added since it was acquired for them
  std::unique_ptr<SharedGradients> shared_;  // null: the engine trains alone, and not reproducibly
  std::vector<bool> outdated_;               // by unit: the shards are newer than the gathered parameters
  struct Addressed {
    const std::byte* begin;
    UnitId unit;
  };
  std::vector<Addressed> by_address_;  // by start of the units' address ranges, ascending
  bool left_ = false;
};

}  // namespace sluice::engine
