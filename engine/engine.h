#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
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

struct Resources {
  Threads& threads;
  allocator::Ledger& ledger;
  offload::RecordStore* disk =
      nullptr;  // REQUIRES: not null where the plan puts anything on disk; not yet allocated
  Trace* trace = nullptr;
  kernels::F32Products* products = nullptr;  // REQUIRES: not null where the optimizer has products
};

struct Core;

// Holds the units of one model and trains them: the same for native models and wrapped ones. Here is what
// every engine does with units and their values; its steps go in the order of a schedule (ScheduledEngine),
// or in any (AnyOrderEngine). Errors: misuse is Error(kState) naming the unit. After an error in the middle
// of an update or a transfer the engine has failed: every further call but the destructor and the questions
// throws Error(kState) that repeats the cause. Thread rule: one thread at a time.
class Engine {
 public:
  virtual ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Layout& layout() const;

  // Questions: each is answered at any time, and nothing is waited for.
  bool in_step() const;
  std::uint64_t steps() const;                       // so far, over all its life
  std::uint64_t steps(ParameterId parameter) const;  // those that had a gradient of this parameter
  const std::string& failure() const;                // why the engine has failed; empty: it has not
  struct Counters {
    double read_wait_seconds = 0, write_wait_seconds = 0;  // the caller waited for reads, for writes
    double optimizer_seconds = 0;                          // arithmetic of updates
  };
  Counters counters() const;

  // Values. Every unit is loaded once before the first step. Both stream: neither needs more memory than the
  // plan's.
  void load(UnitId unit, const UnitSource& source);
  // All units. Where the source throws when one was loaded already, the engine has failed.
  void load_all(const UnitSource& source);
  void save(UnitId unit, const UnitSink& sink);  // settles the unit's pending update first
  void set_steps(std::uint64_t steps);           // when loading
  void set_steps(ParameterId parameter, std::uint64_t steps);

  // Where it lies, for ever. Its values are there while its unit is acquired with parameters.
  ConstArray parameter(ParameterId parameter) const;

  // Lets waiting updates and transfers go on with what has arrived; called between the ops of a model. Never
  // waits.
  void progress();
  // Completes all pending updates.
  void settle();

 protected:
  // Takes all memory and disk space of the plan; throws Error(kBudget) where it cannot.
  // optimizer and resources outlive the engine.
  Engine(const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer,
         const Resources& resources);
  Core& core() const { return *core_; }

 private:
  // Throws a Refusal where the unit's values may not be replaced, or read, now.
  virtual void check_load(UnitId unit) const = 0;
  virtual void check_save(UnitId unit) const = 0;

  std::unique_ptr<Core> core_;
};

}  // namespace sluice::engine
