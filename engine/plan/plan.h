#pragma once
#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "comm/hosts.h"
#include "core/json.h"
#include "engine/layout/tier.h"
#include "engine/plan/profile.h"
#include "engine/plan/rates.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// How much memory and disk space there is.
struct Budget {
  std::uint64_t memory = 0;  // for the whole process
  std::uint64_t disk = 0;    // for swap; 0: no disk tier
  std::uint64_t base = 0;    // what the process holds before the engine takes anything, with the reserve
  std::uint64_t device = 0;  // for a GPU's memory, which is then computed on; 0: the CPU computes
  // The part of it that the engine leaves to others: what CUDA's context and modules take, and the client.
  std::uint64_t device_base = 0;
};

// The parts of a unit, each of which has a tier of its own.
enum class Part : std::uint8_t { kParameters, kGradient, kState };
inline constexpr std::size_t kParts = 3;
constexpr std::size_t index(Part part) { return static_cast<std::size_t>(part); }

// Users write a tier as a place: "memory" is the host's, and "device" a GPU's. Throws Error(kInvalidArgument)
// for other words.
allocator::Tier tier_of_place(std::string_view place);
std::string_view place_of(allocator::Tier tier);

// The highest stage; see PlanRequest.
inline constexpr std::size_t kMostStage = 3;

// Where updates follow gradients at once, in any order and on several ranks: how many units' gradients may
// wait on a rank for others that do not have them yet.
inline constexpr std::size_t kUnitsThatWait = 1;

// One of the ranks that train a model together.
struct RankOf {
  int rank = 0, size = 1;
  std::vector<int> hosts = {};  // as of comm::Hosts: by rank; none: all are on one
  // How many of them compute a micro-batch together: pieces of its layers, or parts of its sequences. Their
  // plans agree on all that they must do in the same order. And how many of these have the same rows; with
  // PlanRequest::reproducible they are size / alike apart.
  int together = 1, alike = 1;
  std::vector<int> parts = {};  // by rank: the part of each layer that it computes; none: all of it
  // Whether pieces of gradients and parameters pass between their GPUs (DeviceRanks): may do so, in a request
  // that chooses; and do, in a plan.
  bool gpus_meet = false;
  // Whether the GPUs of all ranks exchange pieces by NCCL (comm::Nccl), since they do not all read each
  // other's memory. REQUIRES: gpus_meet.
  bool by_nccl = false;
  bool gpus_read() const { return gpus_meet && !by_nccl; }
  comm::Hosts on_hosts() const { return hosts.empty() ? comm::Hosts(size) : comm::Hosts(hosts); }
  bool operator==(const RankOf&) const = default;
};

// Where ranks have their shards of partitioned parameters, if they compute on GPUs: in the GPU's memory, from
// where the others copy them; in host memory, from where the rank's GPU brings them for all (PassedShards);
// or there, or on disk and in pieces there, from where each GPU copies them.
enum class ShardPlace : std::uint8_t { kGpu, kPassed, kHost };

// The choices that the user fixes; the planner makes the others.
struct PlanRequest {
  RankOf ranks;
  // The stage of partitioning over the ranks (ZeRO, Rajbhandari et al. 2020): 0: nothing; 1: the optimizer's
  // state and the masters; 2: also final gradients that wait for their update; 3: also parameters. Nothing:
  // chosen, unit by unit.
  std::optional<std::size_t> stage;
  // The stage of each unit, where ranks have agreed on that; empty: as above. Units that are updated together
  // have the same.
  std::vector<std::size_t> stages = {};
  // Whether updates wait until all gradients are known: for their norm, or, with dynamic loss scaling, for
  // whether all are finite.
  bool clip = true;
  // Gradients are added pairwise over the micro-batches of all ranks, so that their bits do not depend on how
  // many ranks there are; see MicroBatchSums.
  bool reproducible = false;
  // A client's gradients are summed over the ranks in the backward pass of each micro-batch, and a rank adds
  // its own part of the means alone. REQUIRES: stage 2 or 3 is stated; clip; Profile::ends_micro_batches.
  bool sums_each_backward = false;
  std::optional<std::string> recompute;  // "none", "full", a choice's name; "auto" or nothing: chosen
  std::optional<std::size_t> group;      // micro-batches that pass through a unit together
  std::optional<std::size_t> prefetch;   // accesses fetched ahead
  std::optional<std::size_t> chunk_elements;
  // For tests and measurements: the tier of that part of every unit; nothing: chosen.
  std::array<std::optional<allocator::Tier>, kParts> places;
  const std::optional<allocator::Tier>& place(Part part) const { return places[index(part)]; }
  bool flags = false;  // a refusal names the program's flags; else the members of the C ABI's options
  bool trains = true;  // a refusal also says what helps in training
  // The tier that is computed on: the planner sets it by the budget.
  allocator::Tier compute = kCpuTier;
  // Where a GPU computes: the tier of the processor that updates, kDevice or kHost; nothing: chosen.
  std::optional<allocator::Tier> updates = {};
  // Gradients of which ranks would keep parts (Plan::sums_in_backward) stay whole, since parts do not fit.
  bool whole_gradients = false;
  // And where partitioned parameters lie; nothing: chosen. The first two need GPUs that meet, and the first
  // one updates by them.
  std::optional<ShardPlace> shards = {};
  // And whether ranks whose GPUs meet may also sum and gather in host memory: the plan chooses.
  bool chooses_links = false;
  // And the seconds that the client computes in a step; nothing: not known.
  std::optional<double> computing = {};
};

struct UnitPlan {
  // The tier of each part while it is not needed; the gradient's is from its backward pass until its update.
  std::array<allocator::Tier, kParts> tiers = {kCpuTier, kCpuTier, kCpuTier};
  // False: the gradient is not stored by the pager. It is under frames from its one use until its update,
  // which follows at once; or, on the tier kRanks, until it is final, and then this rank's shard of it is
  // kept in memory. It is not resident.
  bool gradient_stored = true;
  // Only this rank's shard of the gradient waits for the update: in the memory that is computed on (on the
  // tier kRanks), or else where the pager stores it, or in a record of its own (gradient_shard_in_record()).
  bool gradient_in_shards = false;
  // Of parameters on the tier kRanks: this rank's shard is on disk, else in memory: of the processor that
  // updates it.
  bool shard_on_disk = false;
  std::size_t choice = 0;              // an index into UnitProfile::choices
  std::size_t stage = 0;               // see PlanRequest
  allocator::Tier compute = kCpuTier;  // the tier that is computed on, which all units of a plan share
  // The tier of the processor that updates the unit: as `compute`, or kHost where a GPU computes.
  allocator::Tier updated_on = kCpuTier;

  allocator::Tier tier(Part part) const { return tiers[index(part)]; }
  void place(Part part, allocator::Tier tier) { tiers[index(part)] = tier; }
  // Whether it is always where the model's processor, or for state the one that updates, computes with it.
  bool resident(Part part) const { return tier(part) == (part == Part::kState ? updated_on : compute); }
  bool updated_by_cpu() const { return updated_on == allocator::Tier::kHost; }
  // Whether this rank's shard of the parameters is in a GPU's memory, from where the other ranks' GPUs copy
  // it.
  bool shard_on_gpu() const {
    return tier(Part::kParameters) == allocator::Tier::kRanks && compute != kCpuTier && updated_on == compute;
  }
  bool gradient_shard_in_record() const {
    return gradient_in_shards && !gradient_stored && tier(Part::kGradient) != allocator::Tier::kRanks;
  }
  // Where ranks compute on GPUs: whether they sum the unit's gradient where it waits for its update, in the
  // host's memory; and whether they gather its parameters where the CPU has updated them. at_the_end: whether
  // sums go on where gradients wait for the step's end.
  bool sums_in_host(bool at_the_end) const {
    return at_the_end && gradient_stored && tier(Part::kGradient) == allocator::Tier::kHost;
  }
  bool gathers_in_host() const {
    return updated_on != compute && tier(Part::kParameters) == allocator::Tier::kHost;
  }
  bool operator==(const UnitPlan&) const = default;
};

// The predicted seconds of a step on a GPU: of each kind of work alone, all of it beside the client's
// computing on the GPU; and of the step with all of that (see walk_on_gpu()).
struct DeviceTime {
  double link = 0;                          // for copies between the GPU and the host
  double gpu_updates = 0, cpu_updates = 0;  // for updates by each
  double disk = 0;
  double ranks = 0;       // for what comes from other ranks through host memory
  GpuRates rates;         // by which these seconds were found,
  double cpu_memory = 0;  // and MachineRates::memory_bandwidth
  // The client's computing in a step, as the client has stated or measured it; nothing: not known, which
  // counts as none in `step`.
  std::optional<double> computing = {};
  double step = 0;
  // The least seconds of a step without computing; below, the name of the kind of work that bounds it.
  double least() const { return std::max({link, gpu_updates, cpu_updates, disk, ranks}); }
  double wait() const { return std::max(0.0, step - computing.value_or(0)); }
  const char* bound() const;
};

// How long a step takes, and what of it.
struct StepTime {
  double compute = 0, optimizer = 0, disk = 0, link = 0;  // seconds that each takes alone
  double transfers = 0;  // seconds of all cores for transfers beside computing
  double step = 0;
  // The seconds of `step` that do not depend on the number of micro-batches: of updates, with waiting for
  // them; and of waiting for sums over ranks.
  double updates = 0, sums = 0;
  double passes() const { return std::max(0.0, step - updates - sums); }
  // Rounding may leave a difference below 0.
  double wait() const { return std::max(0.0, step - compute - optimizer - transfers); }
};

// Says where every byte lives. It is made before the first allocation, and nothing else is taken.
struct Plan {
  RankOf ranks;  // the rank that the plan is for
  bool clip = true, reproducible = false, sums_each_backward = false;
  std::vector<UnitPlan> units;
  std::size_t group = 1;     // micro-batches that pass through a unit together
  std::size_t prefetch = 1;  // accesses fetched ahead
  // Whether there are frames for a gradient that ranks are adding up, while the next unit is computed.
  bool sums_beside = false;
  // Where updates wait for the step's end: gradients are summed in backward, and then a rank keeps its own
  // part of them alone (stages 2 and 3).
  bool sums_in_backward = false;
  // Where the plan chose what joins GPUs: nothing fits with the host's memory, so that all ranks' GPUs meet.
  bool needs_gpus_to_meet = false;
  std::size_t extent_bytes = 0;  // the size of an extent
  std::size_t extents = 0;
  std::size_t chunk_elements = 0;  // in a chunk of a streamed update; a multiple of kChunkGrain
  std::size_t staging_slots = 0;
  // Staging slots in host memory, where a GPU computes and the CPU updates.
  std::size_t host_slots = 0;
  std::string updates_because;     // where a GPU computes: what updates, and why
  std::size_t serving_pieces = 0;  // through which shards of parameters on disk are read; see StoredShards
  // The memory through which parameters from other hosts come to the ranks of this one; see RelayedShards.
  std::size_t relay_pieces = 0, relay_piece_bytes = 0;
  // The memory of this rank's GPU from which others copy shards of parameters that are in host memory.
  std::size_t passing_places = 0, passing_place_bytes = 0;
  std::size_t activation_bytes = 0, workspace_bytes = 0;
  std::size_t sums_bytes = 0;  // for gradients that wait to be added within an access; see Gradients

  double state_bytes_per_parameter = 0;  // of arrays and masters

  // Predictions.
  std::array<std::array<std::uint64_t, allocator::kPurposes>, allocator::kTiers> bytes = {};
  std::uint64_t peak_memory = 0, disk_bytes = 0;
  std::uint64_t device_bytes = 0;                             // of a GPU's memory
  std::uint64_t step_bytes_in = 0, step_bytes_out = 0;        // to a GPU, and from it
  std::uint64_t step_bytes_read = 0, step_bytes_written = 0;  // from and to the disk tier
  // The bytes read where ranks that fetch a shard of parameters on disk are so far apart that each reads it.
  std::uint64_t step_bytes_read_apart = 0;
  // The bytes that this rank receives from other ranks, and its host from other hosts.
  std::uint64_t step_bytes_received = 0, step_bytes_from_hosts = 0;
  // Of the former, the bytes that other sections of a pipeline send; the others are gradients and parameters.
  std::uint64_t step_bytes_from_sections = 0;
  // And the bytes that come while layers are computed, from ranks that have other pieces of them.
  std::uint64_t step_bytes_of_layers = 0;
  std::uint64_t step_bytes_of_data() const {
    return step_bytes_received - step_bytes_from_sections - step_bytes_of_layers;
  }
  bool knows_link = false;  // whether it is known what joins the ranks
  StepTime time;            // where the CPU computes
  DeviceTime device_time;   // where a GPU does
  // Names the resource that bounds a step: the disk, the link to other ranks, or the cores.
  const char* bound() const {
    const double cores = time.compute + time.optimizer + time.transfers;
    if (time.link > std::max(cores, time.disk)) return "link";
    return time.disk > cores ? "disk" : "compute";
  }
  bool uses_disk() const { return disk_bytes > 0; }
  std::vector<std::size_t> stages() const;       // by unit
  std::optional<std::size_t> one_stage() const;  // that of all units; nothing where they differ
  std::vector<bool> partitions_state() const;    // by unit: whether each rank has a shard of its state
  std::vector<bool> updated_by_cpu() const;      // by unit
  bool sums_in_host(UnitId unit) const { return units[unit].sums_in_host(clip && !sums_in_backward); }
  bool partitions_any(Part part) const;  // whether ranks have shards of that part of any unit
  bool shards_on_gpus() const;           // whether those of some unit's parameters are there
  ShardPlace shard_place() const {
    return shards_on_gpus() ? ShardPlace::kGpu : passing_places > 0 ? ShardPlace::kPassed : ShardPlace::kHost;
  }
  // The tier that is computed on. REQUIRES: it has units.
  allocator::Tier compute() const { return units.front().compute; }
};

// A table for people, and the same for programs.
std::string to_text(const Plan& plan, const Profile& profile, const Budget& budget);
Json to_json(const Plan& plan, const Profile& profile, const Budget& budget);

}  // namespace sluice::engine
