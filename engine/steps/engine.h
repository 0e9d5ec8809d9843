#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "comm/communicator.h"
#include "comm/nccl.h"
#include "core/device.h"
#include "core/threads.h"
#include "core/trace.h"
#include "engine/layout/layout.h"
#include "engine/layout/shards.h"
#include "engine/plan/plan.h"
#include "engine/plan/profile.h"
#include "offload/records.h"
#include "optim/optimizer.h"

namespace sluice::engine {

class StateReads;

// The source of a unit's values. Elements are counted within the unit's span of a parameter.
struct UnitSource {
  // Fills `out` with values of a parameter, from element `first` on: those of its master, where it has one.
  // Null (REQUIRES: the unit has no masters): the values stay as they are.
  std::function<void(ParameterId, std::size_t first, std::span<float> out)> values;
  // Does the same for an array of the state (see Optimizer::state()). Null: it becomes zero.
  std::function<void(ParameterId, std::size_t array, std::size_t first, std::span<float> out)> state;
  // Fills in an array of a whole parameter (see Optimizer::whole_names()). Null: it becomes zero.
  std::function<void(ParameterId, std::size_t array, std::span<float> out)> whole;
};

// The destination of a unit's values when it is saved. Each function is called with consecutive runs of
// elements, parameter by parameter; a null function is not called. `parameter`, `master` and `state` are
// called from several threads at once, but for one array from one thread at a time; `values` and `whole` from
// the caller's thread. A frozen unit has neither masters nor state.
struct UnitSink {
  std::function<void(ParameterId, std::size_t first, std::size_t count, ConstArray values)> parameter;
  std::function<void(ParameterId, std::size_t first, std::span<const float>)> master;
  // `values` has the array's type. With `scales` it has codes, and `first` is a multiple of kScaleBlock.
  std::function<void(ParameterId, std::size_t array, std::size_t first, std::size_t count, ConstArray values,
                     const float* scales)>
      state;
  // Called last, with a whole parameter's array.
  std::function<void(ParameterId, std::size_t array, std::span<const float> values)> whole;
  // Called with the values in f32: those of the masters, where there are any. Where state is partitioned, it
  // gets the parameters instead, and is alone: no other rank takes part, and no other function is called.
  std::function<void(ParameterId, std::size_t first, std::span<const float>)> values;
};

// Which elements of a unit a caller wants: of its parameters, and of its masters and state.
struct WantedElements {
  std::function<bool(ElementRange)> parameters, state;
};

// How a unit is partitioned over the ranks.
struct Partition {
  std::vector<ElementRange> shards;  // of masters and state, one per rank; empty: not partitioned
  bool parameters = false;           // whether the parameters are partitioned likewise
  // The ranks of the shards; the first one also has what is not partitioned. Empty: they are 0, 1, ..., and
  // every rank has what is not partitioned.
  std::vector<int> ranks = {};
  int rank(std::size_t shard) const { return ranks.empty() ? static_cast<int>(shard) : ranks[shard]; }
  // The rank that has what is not partitioned; the rank that has an element of the state. nullopt: all ranks.
  std::optional<int> of_whole() const { return ranks.empty() ? std::nullopt : std::optional(ranks[0]); }
  std::optional<int> owner(std::size_t element) const;
};

struct GroupSettings {
  double learning_rate = 0;
  double weight_decay = 0;
  std::shared_ptr<const optim::Settings> settings = {};  // Optimizer::for_step(); null: the optimizer's own
};

struct StepSettings {
  std::vector<GroupSettings> groups;  // by ParameterSpec::group
  double clip = 0;  // bound of the norm of all gradients; 0: none. REQUIRES: the plan was made for clipping
  double gradient_factor = 1;   // multiplies all gradients first (unscaling)
  bool keep_gradients = false;  // AnyOrderEngine: the next step adds to these gradients
  double clip_value = 0;  // bound of each element's magnitude, applied last; 0: none. Any plan allows it
};

struct StepResult {
  double gradient_norm = 0;  // before clipping, after unscaling
  double clip_factor = 1;
};

struct Resources {
  Threads& threads;
  allocator::Ledger& ledger;
  // REQUIRES: not null where the plan puts anything on disk; not yet allocated.
  offload::RecordStore* disk = nullptr;
  Trace* trace = nullptr;
  kernels::F32Products* products = nullptr;  // REQUIRES: not null where the optimizer has products
  // The ranks that train the model together, each with an engine of the same layout, and a plan with the same
  // stages. Null: this engine trains alone.
  comm::Communicator* communicator = nullptr;
  Device* device = nullptr;  // REQUIRES: not null where the plan computes on a GPU
  // The sections of a pipeline, in order, where this engine has the units of one of them. The engines of the
  // other sections train theirs with the same settings. Null: this engine has the whole model.
  comm::Communicator* sections = nullptr;
  // REQUIRES: not null where the plan's ranks exchange by NCCL; of `communicator` and `device`. One engine at
  // a time uses it.
  comm::Nccl* nccl = nullptr;

  // The ranks that learn of an error of this one (any group reaches all of them); null where there are none.
  comm::Communicator* others() const { return communicator != nullptr ? communicator : sections; }
};

struct Core;

// Holds the units of one model and trains them, for native and wrapped models. This class has what every
// engine does with units and their values. Steps follow a schedule (ScheduledEngine) or have any order
// (AnyOrderEngine). Errors: misuse is Error(kState) that names the unit. An error in the middle of an update
// or a transfer fails the engine: every further call but the destructor and queries throws Error(kState) that
// repeats the cause. Thread rule: one thread at a time.
class Engine {
 public:
  virtual ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Layout& layout() const;

  // Queries, which may be called at any time and never wait.
  bool in_step() const;
  std::uint64_t steps() const;                       // taken so far
  std::uint64_t steps(ParameterId parameter) const;  // that updated this parameter
  const std::string& failure() const;                // the cause of failure; empty: none
  struct Counters {
    // Time that the caller waited for reads, for writes, and for other ranks.
    double read_wait_seconds = 0, write_wait_seconds = 0, rank_wait_seconds = 0;
    double optimizer_seconds = 0;  // time that updates were computed
  };
  Counters counters() const;

  // Values. Every unit must be loaded before the first step. No call needs more memory than the plan has.
  void load(UnitId unit, const UnitSource& source);
  // Loads all units. If the source throws after a unit was loaded, the engine has failed.
  void load_all(const UnitSource& source);
  void save(UnitId unit, const UnitSink& sink);  // completes the unit's pending update first
  // The same on rank 0 while the others make no call: they are read, and answer in serve_state(), and
  // whenever they wait for other ranks. Their own calls do nothing for a unit whose state is partitioned.
  // Throws Error(kState), with nothing changed, where another rank has set or edited values since. REQUIRES:
  // the CPU computes.
  void save_alone(UnitId unit, const UnitSink& sink);
  // On rank 0: it has taken the state of all units, or could not; error: why, or empty. On another rank:
  // waits for that, in as many calls as this rank has made since the last step. Throws Error(kState) with the
  // text where rank 0 could not.
  void state_is_taken(const std::string& error);
  // Answers the next read of this rank's state, if its updates are as far. state_reads() has the reads, also
  // while other calls are made; null: the state of no unit is partitioned.
  void serve_state();
  StateReads* state_reads() const;
  // Hands out this rank's part of the unit as far as it is wanted, and perhaps more; the sink's `values` are
  // not called. Not collective.
  void save_own(UnitId unit, const UnitSink& sink, const WantedElements& wanted);
  Partition partition(UnitId unit) const;
  void set_steps(std::uint64_t steps);  // for a run that resumes from a checkpoint
  void set_steps(ParameterId parameter, std::uint64_t steps);

  // The address of a parameter never changes; its values are there while its unit is acquired.
  ConstArray parameter(ParameterId parameter) const;

  // Advances updates whose transfers have completed; called between the ops of a model. Never waits.
  void progress();
  // The same, for a client that waits for other ranks, which may wait for updates of this one. May wait for
  // the disk.
  virtual void serve_ranks();
  // Completes all pending updates.
  void settle();

 protected:
  // Takes all memory and disk space of the plan; throws Error(kBudget) where it cannot.
  // optimizer and resources outlive the engine.
  Engine(const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer,
         const Resources& resources);
  Core& core() const { return *core_; }

 private:
  // Throw a Refusal where the unit's values cannot be replaced, or read, now.
  virtual void check_load(UnitId unit) const = 0;
  virtual void check_save(UnitId unit) const = 0;
  // Learns which updates of this step a GPU has skipped, so that they do not count. May wait for the GPU.
  virtual void learn_of_refused() {}
  // Throws a Refusal where nothing may be queued on a GPU now. what: the call, for the message.
  virtual void check_queuing(const char* /*what*/) const {}

  std::unique_ptr<Core> core_;
};

}  // namespace sluice::engine
