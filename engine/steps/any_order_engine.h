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
class SumsInBackward;

// What a client holds a unit for.
enum class Hold : std::uint8_t {
  kRead,          // to read parameters
  kGradient,      // to read parameters and add gradients; only within a step, and not for a frozen unit
  kGradientOnly,  // to add gradients; parameters need not be present
  // To write parameters where they lie, which become the unit's values when it is released. Masters change
  // only for elements that were changed.
  kEdit,
};
constexpr bool with_parameters(Hold hold) { return hold != Hold::kGradientOnly; }
constexpr bool with_gradient(Hold hold) { return hold == Hold::kGradient || hold == Hold::kGradientOnly; }

// An engine whose client (a wrapped model) acquires units in any order, several at once, and outside of a
// step for reading. The order of a step is recorded, and the next step fetches ahead by it. A step is
// begin_step(); then acquire(), add_gradient() and release() as often as needed; then step() or
// abandon_step(). Gradients are final at step(), which takes the settings; a parameter without a gradient is
// not updated. Where the plan does not clip, the gradients of a unit are final when it is no longer held, and
// are then applied with the settings of begin_step(). Each parameter then gets one gradient in a step, and it
// is release() that throws Error(kNotFinite), leaving the unit as it was; where a GPU computes, nobody waits
// for gradients there, and it is step(), when other units were updated (but a factor that is not finite is
// known at once). Where the optimizer has rounds for a parameter that spans units, these are updated jointly,
// when all their gradients are final. In a step all of them have a gradient or none has; otherwise step()
// refuses. Parameters are at their address only while their unit is held, for reading unless it is held for
// editing; a touch at another time, or a write, is noticed (see allocator::TouchServer). Values may be loaded
// and saved within a step, but a unit that is held cannot be loaded.
//
// Where several ranks train the model, each adds gradients of its own. A gradient is the mean over all ranks
// from its first use on: by step(), read_gradient(), multiply_gradient() or gradient_norm(), which then wait
// until every other rank uses gradients, too. What a rank adds later is averaged at the next use, and added.
// Where state is partitioned, a rank has the sums of its own shard alone: read_gradient(), and adding to a
// gradient that was used or kept, wait until the others use gradients, and all then have that one whole.
// Ranks step alike: a step in which they differ is a Refusal on all of them. Units may be acquired by one
// rank alone, but for editing by all ranks alike; where parameters are partitioned, the end of an edit waits
// for the others. Where state is partitioned, step() completes the updates, so that no rank needs another one
// outside of a step.
//
// Where the client says where micro-batches end (Profile::ends_micro_batches), sums over ranks go on beside
// the last one of a step: see end_gradients().
//
// Where such a plan does not clip, a unit's gradients are summed over the ranks when it is no longer held, in
// an order that the ranks agree on (see SumsInBackward), and its update follows at once. A step has one
// micro-batch on each rank, which end_micro_batch() ends, or step(). Gradients cannot be read or multiplied
// then. A mean that is not finite, and a step that is abandoned after its first sums, fail the engines of all
// ranks.
//
// With a reproducible plan a gradient is the mean over all micro-batches of the step, with the same bits at
// any number of ranks. Each rank ends as many micro-batches in a step (Profile::micro_batches) before
// gradients are used, and adds one gradient of a parameter at most in each; nothing is added to gradients
// that were used.
class AnyOrderEngine final : public Engine {
 public:
  // Takes all memory and disk space of the plan, as Engine() says. Throws Error(kInvalidArgument) for a
  // reproducible plan that does not clip, and for one of several ranks that does not and has more than one
  // micro-batch of each in a step.
  AnyOrderEngine(const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer,
                 const Resources& resources);
  ~AnyOrderEngine() override;

  // Questions, answered as those of Engine.
  std::vector<Hold> holds(UnitId unit) const;  // in the order of acquiring, without holds for touches
  // Each unit once, in the order of acquiring, without holds for touches.
  std::vector<UnitId> held_units() const;
  bool has_gradient(ParameterId parameter) const;  // one of this step, or one that was kept
  bool left() const { return left_; }
  // The unit in whose home it lies.
  std::optional<UnitId> unit_at(const std::byte* address) const;

  // Where a GPU computes: the stream on which the client queues what it does with parameters and gradients
  // from now on; it outlives the engine, or another one takes its place before. The GPU begins that when a
  // unit is there, and goes on with the unit when it has done what was queued before release(): the client's
  // thread waits for neither. While the stream is captured into a graph of CUDA's, calls that may queue
  // something, or wait, are an Error(kState), and change nothing: a graph does at each replay what was
  // captured, and units move otherwise each time. Calls that do neither go on then: begin_step(),
  // set_steps() where no gradients were added that are applied in backward, end_gradients(), where no other
  // ranks are multiply_gradient() and end_micro_batch(), drop_gradient() and release_touched() where there is
  // nothing to drop or to release, and questions. Other streams may be captured at any time, but where the
  // client's is CUDA's default one, only those that were made non-blocking. The engine may also end then, if
  // no unit is held.
  void use_stream(CUstream_st* stream);

  void begin_step(const StepSettings& settings);
  // The unit is held until it is released as often as it was acquired.
  void acquire(UnitId unit, Hold hold);
  void release(UnitId unit);  // ends the latest hold
  // Adds a gradient to what this step has of the parameter. REQUIRES: its unit is held for gradients.
  void add_gradient(ParameterId parameter, ConstArray gradient);
  // For a client that says where micro-batches end (Profile::ends_micro_batches): this rank adds nothing more
  // to the unit's gradients in this micro-batch. In the last one of a step their sum over the ranks begins,
  // where the gradients are in memory.
  void end_gradients(UnitId unit);
  // Ends a micro-batch: see SharedGradients. With several ranks the last one of a step is a use of all
  // gradients, unless the plan is reproducible.
  void end_micro_batch();
  // Ends the step. Throws Error(kNotFinite) that names a parameter whose gradient is not finite, or the norm:
  // no parameter was changed then, and the step is over.
  StepResult step(const StepSettings& settings);
  // Ends the step without an update, drops its gradients, and releases every unit. The other ranks abandon
  // it, too, or this one does it again.
  void abandon_step();

  // These work at any time on the gradient of a parameter; Error(kState) where there is none. Only
  // read_gradient() brings elements into memory: the norm (NaN where an element is, else infinite where one
  // is) is known already, and a factor is applied when the gradient is used. A factor that comes while an
  // update is pending does not change that update.
  void read_gradient(ParameterId parameter, Array out);  // out: [elements]; waits for a pending update
  void multiply_gradient(ParameterId parameter, double factor);
  double gradient_norm(ParameterId parameter);
  void drop_gradient(ParameterId parameter);  // allowed where there is none

  // The server gets the touches of absent parameters, and calls touch(), which brings the unit in for
  // reading, or for writing too, and holds it until release_touched(). Where that needs room, units that were
  // touched before are released, the oldest first.
  void serve_touches(allocator::TouchServer& server) const;
  void touch(UnitId unit, bool write);
  void release_touched();

  // The end. `take` gets each unit's addresses, which outlive the engine. With values, pending updates are
  // applied, and the values stay at the addresses in ordinary memory, for which the engine frees its own on
  // the way. Without values nothing is there, and the engine may have failed before. Afterwards only the
  // destructor and questions may be called. After an error, units that had not left yet leave without values.
  // REQUIRES, with values: no unit is held. Where ranks have shards of parameters, all leave together.
  void leave(bool with_values, const std::function<void(UnitId, allocator::FormerHome)>& take);
  // By how much the process grows at most while all units leave with values; negative: it shrinks.
  std::int64_t growth_of_leaving() const;

  // Applies another plan, between steps. Values, state and addresses stay; parts with another tier are moved,
  // and never more memory is held than one of the two plans has. Nothing is changed by Error(kBudget), where
  // the disk has no space for what leaves memory, or by Error(kState), where a unit is held, has no values,
  // or has a gradient. REQUIRES: the plan was made for the same profile, optimizer, chunks, clipping and
  // stages.
  void replan(const Plan& plan);

 private:
  struct Held {
    UnitId unit;
    Hold hold;
    bool touched;  // it was brought in for a touch
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
  // stream: that is captured or not; by default the client's.
  void require_no_capture(const char* what, std::optional<UnitId> unit,
                          std::optional<CUstream_st*> stream = {}) const;
  void require_gradient(ParameterId parameter) const;
  void require_micro_batches(const char* what) const;
  void require_all_or_none() const;  // of the gradients of a joint update
  bool is_held(UnitId unit) const;
  bool is_held_for_gradients(UnitId unit) const;
  HeldIterator oldest_touched() const;

  void make_sums(const Profile& profile);
  void take(const Held& wanted);
  void let_go(HeldIterator at);
  void take_edited(UnitId unit);
  void share_edited(UnitId unit);
  bool has_parts() const;  // whether each rank updates a part of each unit
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
  std::vector<Held> held_;  // in the order of acquiring
  Recorder recorder_;
  std::vector<bool> updated_;  // by parameter: whether it was updated in this step already
  // Those of this step whose gradients a GPU has found not finite: the first one of each unit.
  std::vector<ParameterId> refused_;
  std::vector<bool> changed_;  // by unit: whether gradients were added since it was acquired for them
  // Both null: it trains alone, and not reproducibly. The second one: sums go on in backward, which updates
  // follow at once, or of which this rank keeps its part (Plan::sums_in_backward).
  std::unique_ptr<SharedGradients> shared_;
  std::unique_ptr<SumsInBackward> sums_;
  std::vector<bool> outdated_;  // by unit: the shards of its parameters are newer than what is held
  struct Addressed {
    const std::byte* begin;
    UnitId unit;
  };
  std::vector<Addressed> by_address_;  // the homes of all units, in ascending order
  bool left_ = false;
};

}  // namespace sluice::engine
