#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "core/threads.h"
#include "core/trace.h"
#include "engine/layout.h"
#include "engine/plan/plan.h"
#include "engine/plan/profile.h"
#include "offload/records.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// Where a unit's values come from when it is created or loaded. Elements are of the logical parameter.
struct UnitSource {
  // Fills out with the values of elements first ... of a parameter: of its master, where it has one. Null
  // (REQUIRES: no masters): they stay as they are.
  std::function<void(ParameterId, std::size_t first, std::span<float> out)> values;
  // The same for an array of the optimizer's state (index into Optimizer::state()); null: zeros.
  std::function<void(ParameterId, std::size_t array, std::size_t first, std::span<float> out)> state;
  // The whole of an array that is not by elements (index into Optimizer::whole_names()); null: zeros.
  std::function<void(ParameterId, std::size_t array, std::span<float> out)> whole;
};

// Where a unit's values go when it is saved: called with consecutive runs of elements, parameter by
// parameter. Parameters, masters and each array of the state come from different threads at once; values from
// the caller's own. What is null is not asked for. A frozen unit has neither masters nor state.
struct UnitSink {
  std::function<void(ParameterId, std::size_t first, std::size_t count, ConstArray values)>
      parameter;  // compute type
  std::function<void(ParameterId, std::size_t first, std::span<const float>)>
      master;  // only where a master exists
  // In the array's type. scales: of codes, null for other types; first is a multiple of kScaleBlock then.
  std::function<void(ParameterId, std::size_t array, std::size_t first, std::size_t count, ConstArray values,
                     const float* scales)>
      state;
  // As a source's, from the caller's thread, after the rest.
  std::function<void(ParameterId, std::size_t array, std::span<const float> values)> whole;
  // The values in f32, whatever holds them: those of the master, where there is one.
  std::function<void(ParameterId, std::size_t first, std::span<const float>)> values;
};

struct GroupSettings {
  double learning_rate = 0;
  double weight_decay = 0;
  std::shared_ptr<const optim::Settings> settings = {};  // of this step: Optimizer::for_step(); null: its own
};

struct StepSettings {
  std::vector<GroupSettings> groups;  // by ParameterSpec::group
  double clip = 0;             // bound of the global norm; 0: none. The plan must have been made for clipping
  double gradient_factor = 1;  // all gradients are multiplied by it first (unscaling)
  bool keep_gradients = false;  // any order: the next step adds to these, unless they are dropped before
  double clip_value = 0;        // bound of each element, after the above; 0: none. Any plan will do
};

struct StepResult {
  double gradient_norm = 0;  // before clipping, after unscaling
  double clip_factor = 1;
};

// What is written for one use of one parameter by one micro-batch: f32, [elements of the parameter].
struct GradientTarget {
  float* data = nullptr;
  bool accumulate = false;  // add to what is there; else overwrite all of it
};

struct Resources {
  Threads& threads;
  allocator::Ledger& ledger;
  offload::RecordStore* disk =
      nullptr;  // REQUIRES: not null where the plan puts anything on disk; not yet allocated
  Trace* trace = nullptr;
  kernels::F32Products* products = nullptr;  // REQUIRES: not null where the optimizer has products
};

// Holds the units of one model and trains them: the same for native models and wrapped ones.
// Calls of a step, in order: begin_step; for each group of micro-batches, the accesses of the profile's
// schedule, each acquire ... release; step. The update of a unit follows at once when its gradient is final,
// or (clipping) is due at its next acquire; see "One step" in docs/architecture.md. Errors: misuse is
// Error(kState) naming the unit. After an error in the middle of an update or a transfer the engine has
// failed: every further call but the destructor throws Error(kState) that repeats the cause. Thread rule: one
// thread at a time.
// Where the profile has any order (a wrapped model), accesses come in whatever order the client has, also of
// several units at once, and outside of a step for reading. The order is recorded; in the next step the
// accesses that follow are fetched ahead by it. Gradients come by add_gradient(), and are final at step(),
// which takes the settings; a parameter that got none is left as it is. Where the plan does not clip, a
// unit's are final when it is not held any more, and applied then with the settings of begin_step(): one
// gradient of each parameter in a step; it is release() that throws Error(kNotFinite), and the unit is as it
// was. Where the optimizer has rounds for a parameter that spans units, these are updated together, as one:
// when the gradients of all are final. In a step each of them gets one, or none does; step() refuses
// otherwise. Parameters are at their address only while their unit is held, to be read only but for editing;
// a touch at another time, or a write, is noticed (see allocator::TouchServer). Values may be loaded and
// saved in the middle of a step.
class Engine {
 public:
  // Takes all memory and disk space of the plan; throws Error(kBudget) where it cannot.
  // optimizer and resources outlive the engine.
  Engine(const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer,
         const Resources& resources);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Layout& layout() const;

  // Values. Every unit is loaded once before the first step. Both stream: neither needs more memory than the
  // plan's.
  void load(UnitId unit, const UnitSource& source);
  void save(UnitId unit, const UnitSink& sink);  // settles the unit's pending update first
  std::uint64_t steps() const;                   // so far, over all its life
  // The same for one parameter, which any order may have left out of some.
  std::uint64_t steps(ParameterId parameter) const;
  void set_steps(std::uint64_t steps);  // when loading
  void set_steps(ParameterId parameter, std::uint64_t steps);

  // A step.
  bool in_step() const;
  void begin_step(const StepSettings& settings);
  void acquire(const Access& access);  // the next one of the schedule
  void release(const Access& access);
  ConstArray parameter(
      ParameterId parameter) const;  // REQUIRES: acquired with parameters; stays at this address for ever
  // micro_batch: index within the step, ascending for each use. REQUIRES: acquired with that gradient use.
  GradientTarget gradient(ParameterId parameter, int use, std::size_t micro_batch);
  // Any order: adds to what the step has of this parameter. REQUIRES: its unit is held with gradient use 0
  // (without its parameters, where those are not needed).
  void add_gradient(ParameterId parameter, ConstArray gradient);
  // Any order, at any time, of a parameter that has a gradient; Error(kState) otherwise. They bring in no
  // more than they need: the norm (infinite where an element is not finite) is known, the factor is applied
  // when the gradient is used. A factor that comes while an update is pending is for later uses.
  void read_gradient(ParameterId parameter, Array out);  // out: [elements]; waits for a pending update
  void multiply_gradient(ParameterId parameter, double factor);
  double gradient_norm(ParameterId parameter);
  void drop_gradient(ParameterId parameter);  // also where there is none
  // After the last group. Throws Error(kNotFinite) naming a parameter whose gradient is not finite; where
  // updates wait for step() the parameters are then unchanged and the engine goes on, else it has failed, and
  // it is the release() of that gradient that throws.
  StepResult step();
  StepResult step(const StepSettings& settings);  // any order: the settings are known only now
  // Any order: the step is over without an update. Its gradients are dropped, and what is held is released.
  void abandon_step();

  // Any order: a unit whose parameters the client writes where they lie. When it is released they are its
  // values, and the masters' (of those elements that were changed). Counts as held.
  void acquire_for_editing(UnitId unit);
  void release_from_editing(UnitId unit);

  // For evaluation: parameters of one unit at any time outside of a step, in any order.
  void acquire_for_reading(UnitId unit);
  void release_from_reading(UnitId unit);

  // Any order: touches of absent parameters go to the server. unit_at: whose address it is.
  void serve_touches(allocator::TouchServer& server) const;
  std::optional<UnitId> unit_at(const std::byte* address) const;

  // Any order: the end. Each unit's addresses outlive the engine, in the hands of `take`: with its values
  // under them, after its pending update, in ordinary memory, for which the engine's own is given back on the
  // way; or without values, which works with an engine that has failed, too. Afterwards nothing but the
  // destructor may be called. An error on the way leaves those units without values that have not left.
  // REQUIRES: nothing is held where there are to be values.
  void leave(bool with_values, const std::function<void(UnitId, allocator::FormerHome)>& take);
  // By how much the process grows at most while all leave with their values (negative: it shrinks).
  std::int64_t growth_of_leaving() const;

  // Any order, between steps: the same units by another plan, where they are by this one and how much they
  // take. Values, state and addresses stay; what has another place is moved, and no more memory is held
  // meanwhile than by one of the two. Error(kBudget), with nothing changed, where the disk has no room for
  // what leaves memory; Error(kState), likewise, where a unit is held, has no values, or has a gradient.
  // REQUIRES: made for the same profile, optimizer, chunks and clipping.
  void replan(const Plan& plan);

  // Lets waiting updates and transfers go on with what has arrived; called between the ops of a model. Never
  // waits.
  void progress();
  // Completes all pending updates.
  void settle();

  // A schedule's client has memory that it does not need from the end of backward into the next forward pass:
  // states on disk are read ahead into it for the updates that the next step needs first, and written from
  // there. All of that memory; outside of a step. It outlives end_lending().
  void set_lendable(std::span<std::byte> memory);
  void lend(std::size_t from);        // its bytes from there on, in the backward pass of the last group
  void take_back(std::size_t until);  // waits until those before that byte are the client's again
  // Takes all of it back; where the engine has failed, too.
  void end_lending() noexcept;

  struct Counters {
    double read_wait_seconds = 0, write_wait_seconds = 0;  // the caller waited for reads, for writes
    double optimizer_seconds = 0;                          // arithmetic of updates
  };
  Counters counters() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sluice::engine
