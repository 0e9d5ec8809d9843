#pragma once
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "engine/gradients/gradients.h"
#include "engine/memory/backing.h"
#include "engine/memory/device_disk.h"
#include "engine/memory/device_work.h"
#include "engine/memory/host_records.h"
#include "engine/memory/host_staging.h"
#include "engine/memory/pager.h"
#include "engine/memory/parameter_shards.h"
#include "engine/memory/shard_memory.h"
#include "engine/memory/state_store.h"
#include "engine/memory/waits.h"
#include "engine/memory/whole_store.h"
#include "engine/ranks/ranks.h"
#include "engine/steps/engine.h"
#include "engine/steps/refusal.h"
#include "engine/steps/unit_values.h"
#include "engine/updates/buckets.h"
#include "engine/updates/sums_of_ranks.h"
#include "engine/updates/update_pipeline.h"
#include "engine/updates/update_queue.h"

// Private to this room.
namespace sluice::engine {

// What all ranks must step with alike.
std::string text_of(const StepSettings& settings);

// What both kinds of engine are built on: where units, gradients and state are, which updates are due, and
// what the steps of both kinds share. It knows nothing of the order in which units are accessed. Its
// functions throw; the calls on an engine go through guarded().
struct Core {
  Core(const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer,
       const Resources& resources);
  ~Core();

  const std::string& name_of(UnitId unit) const { return layout.units()[unit].name; }
  UnitRange together(UnitId unit) const { return updated_together(layout, optimizer, unit); }
  ValueStreams streams(UnitId unit);
  // held: see Pager::set_schedule().
  void set_schedule(const std::vector<Access>& accesses, const std::vector<std::vector<Access>>& held = {});

  // Returns action(*this). An error other than a Refusal leaves the engine failed.
  template <class Action>
  auto guarded(Action&& action) {
    if (!failure.empty())
      fail(ErrorCode::kState, "the engine has failed: {}; make another, and go on from the last checkpoint",
           failure);
    try {
      return action(*this);
    } catch (const Refusal&) {
      throw;
    } catch (const std::exception& error) {  // also an error of a source, in load_all(), or of the allocator
      fail_with(error.what());
      throw;
    } catch (...) {
      fail_with("an exception of an unknown type");
      throw;
    }
  }
  void fail_with(const std::string& why);  // tells the other ranks, too

  // Values. load() and save() return what the caller's function threw, which leaves the core whole.
  void require_values(UnitId unit) const;
  std::exception_ptr load(UnitId unit, const UnitSource& source);
  std::exception_ptr save(UnitId unit, const UnitSink& sink);
  std::exception_ptr save_own(UnitId unit, const UnitSink& sink, const WantedElements& wanted);
  void settle();
  void wait_for_edit(UnitId unit);  // until every rank changes the unit's values

  // A step. Each kind of engine decides when gradients are final, and which updates become due.
  void begin_step(const StepSettings& given);
  void check_settings(const StepSettings& given) const;
  StepResult measure() const;  // the norm of all gradients, before clipping
  void serve_ranks();          // UpdateQueue::serve_ranks(); an error is also the other ranks'
  // Makes what each rank knows of its part of these gradients known to all, where they are in parts.
  void gather_squares(std::span<const ParameterId> of);
  // Whether each rank has a shard of the unit's state; of its parameters.
  bool partitions_state(UnitId unit) const { return ranks && ranks->partitioned(unit); }
  bool partitions_parameters(UnitId unit) const { return parameter_shards && parameter_shards->has(unit); }
  // The elements of the unit that this engine updates.
  ElementRange own(UnitId unit) const { return states.format().shards().here(unit); }
  bool checks_on_gpu() const { return gpu && !plan.clip; }  // whether a GPU finds out if gradients are finite
  // Begins to sum, over the ranks, what each has added to these gradients of a unit, in the first buffers of
  // the unit: as many as this rank has in `order`. whole: the unit's other elements may be summed with them.
  TransferGroup sum_over_ranks(UnitId unit, std::span<const ParameterId> of, bool whole,
                               const comm::SumOrder& order);
  // Divides such sums, of the elements that this rank has of them, and measures the means.
  void make_mean(UnitId unit, std::span<const ParameterId> of, double divisor);
  // Multiplies those elements of a gradient that are `within` these of its unit.
  void scale_gradient(ParameterId parameter, double factor, ElementRange within);
  // Waits for other ranks, and goes on with updates meanwhile.
  void wait_for_ranks(const std::string& what, TransferGroup& group);
  void clip(StepResult& result);
  static bool representable(double norm);  // tells whether f32 can hold the norm, and so every element
  [[noreturn]] void refuse_not_finite(std::optional<ParameterId> parameter, double norm) const;
  // Makes the update of these units due, with a copy of the settings. Each parameter that has a gradient is
  // updated. Where an update follows its gradient at once, it holds the parameters until it is applied:
  // with_parameters says whether also those that are not in memory.
  void enqueue(UnitRange units, bool with_parameters);

  // The end, and another plan. The caller has checked that they are allowed.
  void leave(bool with_values, const std::function<void(UnitId, allocator::FormerHome)>& take);
  void replan(const Plan& next);

  // Tells other ranks that this one works, and does not hang, while they wait for it.
  void report_work() const {
    if (ranks) ranks->communicator().report_work();
  }

  Resources resources;
  const optim::Optimizer& optimizer;
  Plan plan;
  Layout layout;
  std::optional<Ranks> ranks;  // nothing: the engine trains alone
  Waits waits;
  std::optional<DeviceWork> gpu;                    // nothing: the CPU computes
  std::optional<HostRecords> host_records;          // nothing: the CPU computes
  std::optional<DeviceDisk> gpu_disk;               // nothing: the CPU computes, or there is no disk
  std::optional<ParameterShards> parameter_shards;  // nothing: every unit's parameters are whole here
  ShardMemory gradient_shards;                      // of final gradients that are not kept whole
  std::unique_ptr<Backings> backings;
  Pager pager;
  Gradients gradients;
  StateStore states;
  WholeStore wholes;
  std::optional<SumsOfRanks> sums_of_ranks;  // nothing: this engine has all of every parameter
  Threads one_thread;                        // the one that calls: on it the CPU updates a chunk beside a GPU
  // Where the model is computed; and the CPU's beside a GPU. Null: nothing is updated there.
  std::unique_ptr<UpdateExecutor> executor, cpu_executor;
  UpdatePipeline updates;
  std::optional<HostStaging> host_staging;  // nothing: the CPU computes
  std::vector<HoldingId> parameters;        // by unit
  UpdateQueue queue;

  std::vector<bool> has_values;  // by unit
  StepSettings settings;         // of the present step
  double clip_factor = 1;
  std::uint64_t steps = 0;
  std::vector<std::uint64_t> applied;  // how often each parameter was updated
  bool in_step = false;
  std::string failure;  // why the engine has failed; empty: it has not

 private:
  void take_shard(UnitId unit, bool loaded);
  std::exception_ptr save_parameters_alone(UnitId unit, const UnitSink& sink);
  void gather_wholes(UnitId unit);
  std::vector<StateFormat> formats_of_ranks_;  // made when rank 0 saves first
  static std::vector<allocator::Tier> state_tiers(const Plan& plan);
  static const Resources& checked(const Profile& profile, const Plan& plan, const Resources& resources);
  DeviceWork* work() { return gpu ? &*gpu : nullptr; }
  std::unique_ptr<UpdateExecutor> make_executor();
  std::unique_ptr<UpdateExecutor> make_cpu_executor();
  std::unique_ptr<UpdateExecutor> make_turns(Threads& threads);
  std::vector<std::optional<std::size_t>> gradient_shard_sizes(const Profile& profile) const;
  std::vector<optim::Hyperparameters> hyperparameters() const;
  UpdateQueue::Due due_of(UnitId unit);
  void entrust(UnitId unit);
  bool entrusts_gradient(UnitId unit) const;
  void keep_until_applied(UnitId unit, bool with_parameters, UpdateQueue::Due& due);
  void take_disk(const Plan& next);  // takes disk space for what leaves memory
  std::size_t staging_bytes(const Plan& of) const;
  void place(const Plan& next, bool resident);
};

}  // namespace sluice::engine
