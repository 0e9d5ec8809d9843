#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/threads.h"
#include "engine/gradients/gradient_parts.h"
#include "engine/gradients/gradients.h"
#include "engine/memory/backing.h"
#include "engine/memory/device_disk.h"
#include "engine/memory/device_ranks.h"
#include "engine/memory/device_shards.h"
#include "engine/memory/device_work.h"
#include "engine/memory/host_records.h"
#include "engine/memory/host_staging.h"
#include "engine/memory/nccl_turns.h"
#include "engine/memory/pager.h"
#include "engine/memory/parameter_shards.h"
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

// Everything that an engine holds, placed as the plan says, and what moves and updates it. It knows neither
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
  // Whether the unit's state is partitioned over the ranks; whether its parameters are.
  bool partitions_state(UnitId unit) const { return ranks && ranks->partitioned(unit); }
  bool partitions_parameters(UnitId unit) const { return parameter_shards && parameter_shards->has(unit); }
  // The elements of the unit that this engine updates.
  ElementRange own(UnitId unit) const { return states.format().shards().here(unit); }
  // Whether a GPU finds out if gradients are finite. The CPU does so for means over ranks.
  bool checks_on_gpu() const { return gpu && !plan.clip && !ranks; }
  // held: see Pager::set_schedule().
  void set_schedule(const std::vector<Access>& accesses, const std::vector<std::vector<Access>>& held = {});
  // Collective at its first call, which comes before ranks on GPUs fetch, sum or gather, and after all ranks
  // have made their engines: no rank may wait here for one whose engine could not be made.
  void share_memory();
  // Call before this rank lets others change their shards of the unit. REQUIRES: it fetches nothing of the
  // unit now.
  void await_copies(UnitId unit) {
    if (gpu_shards) gpu_shards->await(unit);
  }
  void settle();  // completes all updates and transfers, also of state that another rank reads
  // Copies this rank's shard from the gathered unit, which is held. May wait for the disk, or for a GPU.
  void take_shard(UnitId unit);
  // Tells ranks that wait for this one that it makes progress.
  void report_work() const {
    if (comm::Communicator* const others = resources.others()) others->report_work();
  }
  static std::vector<allocator::Tier> state_tiers(const Plan& plan);  // by unit

  Resources resources;
  const optim::Optimizer& optimizer;
  Plan plan;
  Layout layout;
  std::optional<Ranks> ranks;        // nullopt: the engine trains alone
  std::optional<Sections> sections;  // nullopt: the engine has the whole model
  Waits waits;
  std::optional<DeviceWork> gpu;                    // nullopt: the CPU computes
  std::optional<HostRecords> host_records;          // nullopt: the CPU computes
  std::optional<DeviceDisk> gpu_disk;               // nullopt: the CPU computes, or there is no disk
  std::optional<ParameterShards> parameter_shards;  // nullopt: every unit's parameters are whole here
  std::optional<DeviceShards> gpu_shards;           // nullopt: likewise, or the CPU computes
  std::unique_ptr<Backings> backings;
  Pager pager;
  Gradients gradients;
  GradientParts gradient_parts;  // of final gradients of which only this rank's shard is kept
  StateStore states;
  WholeStore wholes;
  std::optional<SumsOfRanks> sums_of_ranks;  // nullopt: every parameter is whole here
  Threads one_thread;  // runs on the calling thread: for chunks that the CPU updates beside a GPU
  std::optional<Threads> rank_threads;  // for sums and copies of ranks' pieces beside GPUs
  // The executor of the device that computes, and the CPU's beside a GPU. Null: it updates nothing.
  std::unique_ptr<UpdateExecutor> executor, cpu_executor;
  UpdatePipeline updates;
  std::optional<HostStaging> host_staging;  // nullopt: the CPU computes
  std::optional<NcclTurns> nccl_turns;      // of both collectives below; nullopt: ranks do not use NCCL
  // Collectives of ranks that compute on GPUs: sums of gradients; and gathers of updated units, where state
  // is partitioned and parameters are not. Each has an order of its own, in which all ranks make calls.
  std::optional<DeviceRanks> device_sums, device_gathers;
  bool memory_is_shared = false;      // whether share_memory() was called
  std::vector<HoldingId> parameters;  // by unit
  UpdateQueue queue;

 private:
  static const Resources& checked(const Profile& profile, const Plan& plan, const Resources& resources);
  DeviceWork* work() { return gpu ? &*gpu : nullptr; }
  ByNccl by_nccl();
  bool gathers_on_gpu() const;  // whether updated units are gathered there
  DeviceRanks::Meeting meeting() const {
    return {plan.ranks.gpus_meet, ranks->reads_others(), plan.ranks.by_nccl};
  }
  std::unique_ptr<UpdateExecutor> make_executor();
  std::unique_ptr<UpdateExecutor> make_cpu_executor();
  std::unique_ptr<UpdateExecutor> make_inline(Threads& threads);
};

}  // namespace sluice::engine
