#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/threads.h"
#include "engine/gradients/gradients.h"
#include "engine/memory/backing.h"
#include "engine/memory/device_disk.h"
#include "engine/memory/device_ranks.h"
#include "engine/memory/device_shards.h"
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
#include "engine/ranks/sections.h"
#include "engine/steps/engine.h"
#include "engine/updates/buckets.h"
#include "engine/updates/sums_of_ranks.h"
#include "engine/updates/update_pipeline.h"
#include "engine/updates/update_queue.h"

// Private to this room.
namespace sluice::engine {

// Everything that an engine holds, where the plan puts it, and what moves and updates it. It knows neither
// steps nor an order of units.
struct Stores {
  // Takes all memory and disk space of the plan; the optimizer and the resources outlive it.
  Stores(const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer,
         const Resources& resources);
  ~Stores();
  Stores(const Stores&) = delete;
  Stores& operator=(const Stores&) = delete;

  const std::string& name_of(UnitId unit) const { return layout.units()[unit].name; }
  UnitRange together(UnitId unit) const { return updated_together(layout, optimizer, unit); }
  // Whether each rank has a shard of the unit's state; of its parameters.
  bool partitions_state(UnitId unit) const { return ranks && ranks->partitioned(unit); }
  bool partitions_parameters(UnitId unit) const { return parameter_shards && parameter_shards->has(unit); }
  // The elements of the unit that this engine updates.
  ElementRange own(UnitId unit) const { return states.format().shards().here(unit); }
  // Whether a GPU finds out if gradients are finite. Of means over ranks the CPU does.
  bool checks_on_gpu() const { return gpu && !plan.clip && !ranks; }
  // held: see Pager::set_schedule().
  void set_schedule(const std::vector<Access>& accesses, const std::vector<std::vector<Access>>& held = {});
  // Collective at its first call, which comes before what ranks on GPUs fetch, sum or gather, and after all
  // ranks have their engines: one whose engine could not be made must not be waited for.
  void share_memory();
  // Comes before this rank lets others change their shards of the unit, of which it fetches nothing now.
  void await_copies(UnitId unit) {
    if (gpu_shards) gpu_shards->await(unit);
  }
  void settle();  // completes all updates and transfers
  // Whether this rank keeps its part of the unit's final gradient alone.
  bool keeps_gradient_part(UnitId unit) const {
    return gradient_shards.has(unit) || gradient_records[unit] != nullptr;
  }
  // Copies this rank's shard from a unit that is held whole. May wait for the disk, or for a GPU.
  void take_shard(UnitId unit);
  // Tells other ranks that this one works, and does not hang, while they wait for it.
  void report_work() const {
    if (comm::Communicator* const others = resources.others()) others->report_work();
  }
  static std::vector<allocator::Tier> state_tiers(const Plan& plan);  // by unit

  Resources resources;
  const optim::Optimizer& optimizer;
  Plan plan;
  Layout layout;
  std::optional<Ranks> ranks;        // nothing: the engine trains alone
  std::optional<Sections> sections;  // nothing: it has all of the model
  Waits waits;
  std::optional<DeviceWork> gpu;                    // nothing: the CPU computes
  std::optional<HostRecords> host_records;          // nothing: the CPU computes
  std::optional<DeviceDisk> gpu_disk;               // nothing: the CPU computes, or there is no disk
  std::optional<ParameterShards> parameter_shards;  // nothing: every unit's parameters are whole here
  std::optional<DeviceShards> gpu_shards;           // nothing: likewise, or the CPU computes
  ShardMemory gradient_shards;                      // of final gradients that are not kept whole
  // By unit, where a GPU computes: of those that wait in host memory. Null: there is none.
  std::vector<std::unique_ptr<Backing>> gradient_records;
  std::unique_ptr<Backings> backings;
  Pager pager;
  Gradients gradients;
  StateStore states;
  WholeStore wholes;
  std::optional<SumsOfRanks> sums_of_ranks;  // nothing: this engine has all of every parameter
  Threads one_thread;                        // the one that calls: on it the CPU updates a chunk beside a GPU
  std::optional<Threads> rank_threads;       // of what ranks on GPUs make of each other's pieces
  // Where the model is computed; and the CPU's beside a GPU. Null: nothing is updated there.
  std::unique_ptr<UpdateExecutor> executor, cpu_executor;
  UpdatePipeline updates;
  std::optional<HostStaging> host_staging;  // nothing: the CPU computes
  // Ranks that compute on GPUs: for sums of gradients; and, where state is partitioned and parameters are
  // not, for what each has updated. Each has its own order in which all ranks make calls.
  std::optional<DeviceRanks> device_sums, device_gathers;
  bool memory_is_shared = false;      // whether share_memory() was called
  std::vector<HoldingId> parameters;  // by unit
  UpdateQueue queue;

 private:
  static const Resources& checked(const Profile& profile, const Plan& plan, const Resources& resources);
  DeviceWork* work() { return gpu ? &*gpu : nullptr; }
  bool gathers_on_gpu() const;  // what each rank has updated
  DeviceRanks::Meeting meeting() const { return {plan.ranks.gpus_meet, ranks->reads_others()}; }
  std::unique_ptr<UpdateExecutor> make_executor();
  std::unique_ptr<UpdateExecutor> make_cpu_executor();
  std::unique_ptr<UpdateExecutor> make_inline(Threads& threads);
  std::vector<std::optional<std::size_t>> gradient_shard_sizes(const Profile& profile) const;
};

}  // namespace sluice::engine
