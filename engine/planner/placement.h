#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "comm/sum_route.h"
#include "core/bytes.h"
#include "engine/layout/layout.h"
#include "engine/layout/state_format.h"
#include "engine/memory/device_ranks.h"
#include "engine/memory/passed_shards.h"
#include "engine/memory/relayed_shards.h"
#include "engine/plan/given_elements.h"
#include "engine/plan/micro_batch_sums.h"
#include "engine/plan/plan.h"
#include "engine/plan/profile.h"
#include "engine/planner/frames.h"
#include "engine/planner/walk.h"
#include "engine/updates/buckets.h"

namespace sluice::engine {

// The bytes of a plan's units in memory and on disk, without frames and staging.
struct Footprint {
  // Bytes in memory: in huge pages of their own, and in pages shared with the same part of other units.
  std::array<std::uint64_t, kParts> own = {}, shared = {};
  std::array<std::uint64_t, kParts> disk = {};
  std::array<std::uint64_t, kParts> host = {};  // in host memory, where a GPU computes
  // The same, and on disk, of which the GPU knows nothing, since the CPU updates the unit.
  std::uint64_t cpu_state = 0, cpu_disk = 0;
  std::size_t cpu_streamed = 0;  // how many units have something that passes through the CPU's staging
  std::array<std::uint64_t, kParts> shards = {};  // in memory, this rank's shards of what is partitioned
  std::uint64_t metadata = 0;                     // bytes in memory that describe what is on disk
  std::size_t streamed = 0;                       // how many units have something that passes through staging
  std::size_t shards_on_disk = 0;                 // how many units have their shard of parameters there
  std::uint64_t memory(Part part) const {
    return own[index(part)] + round_up(shared[index(part)], kHugePage);
  }
};

// Knows the size of everything that can be placed, and what each placement costs.
class Placement {
 public:
  Placement(const Profile& profile, const optim::Optimizer& optimizer, const PlanRequest& request);

  const Layout& layout() const { return layout_; }
  const StateFormat& format() const { return format_; }
  double element_bytes() const;  // bytes of master and state of a trained element, on average
  const RoundsNeed& rounds() const { return rounds_; }  // memory while an update is computed
  std::string largest_of_rounds() const;  // the name and shape of the parameter that needs most of it
  std::size_t whole_bytes() const { return whole_bytes_; }  // state that is in memory on any tier

  std::size_t stage(UnitId unit) const { return stages_[unit]; }
  // Whether ranks on GPUs read what others have of the unit where it is, in the host's memory; and whether
  // the GPUs copy shards of parameters from there.
  bool reads_pieces(UnitId unit) const { return stages_[unit] > 0 && hosts_.all_on_one(); }
  bool reads_any_pieces() const { return partitions_any_state() && hosts_.all_on_one(); }
  // Whether ranks sum the unit's gradient on their GPUs; and whether they gather there what each has updated
  // of its parameters.
  bool sums_on_gpus(const UnitPlan& plan) const { return ranks_.gpus_meet && !sums_in_host(plan); }
  bool gathers_on_gpus(const UnitPlan& plan) const { return ranks_.gpus_meet && !plan.gathers_in_host(); }
  DeviceRanks::Meeting meeting() const { return {ranks_.gpus_meet, reads_any_pieces(), ranks_.by_nccl}; }
  bool copies_shards() const { return compute_ == allocator::Tier::kDevice && hosts_.all_on_one(); }
  ShardPlace shards() const { return shards_; }  // where partitioned parameters are
  // Whether partitioned parameters are in the memory of GPUs, which copy them from each other.
  bool shards_on_gpus() const { return has_shards(ShardPlace::kGpu); }
  // And whether they are in host memory, and each rank's GPU brings its own for all of them.
  bool passes_shards() const { return has_shards(ShardPlace::kPassed); }
  std::size_t parameter_bytes(UnitId unit) const;
  std::size_t gradient_bytes(UnitId unit) const;  // all uses
  std::size_t state_bytes(UnitId unit) const;
  // Whether the unit's gradient is stored: because its update waits for the norm of all gradients or for
  // other units (a joint update), or because other uses or groups of micro-batches add to it.
  bool stores_gradient(UnitId unit, std::size_t groups) const;

  // Whether this rank keeps a shard of the unit's parameters; of its final gradient, where that waits.
  bool partitions_parameters(UnitId unit) const;
  bool partitions_any_state() const {
    return std::ranges::count(stages_, std::size_t{0}) < std::ssize(stages_);
  }
  // Whether a step that a GPU computes ends when the unit's update has: other ranks wait for what only calls
  // of this one go on with, gathers and what passes the disk and the GPU.
  bool settles(UnitId unit, const UnitPlan& plan) const {
    if (stages_[unit] == 0 || !updated(unit)) return false;
    const bool on_disk = std::ranges::count(plan.tiers, allocator::Tier::kDisk) > 0;
    return plan.tier(Part::kParameters) != allocator::Tier::kRanks || buckets_[unit].front().rounds > 0 ||
           (on_disk && !plan.updated_by_cpu());
  }
  std::size_t fetches(UnitId unit) const { return units_[unit].at.fetches; }  // of parameters, by a group
  // Where a GPU computes, a group is one of so many micro-batches of a step.
  std::size_t micro_batches() const { return profile_.micro_batches; }
  // Whether some unit's parameters, which each rank has, are updated by parts.
  bool gathers_any() const;
  bool partitions_any_parameters() const { return std::ranges::count(stages_, kMostStage) > 0; }
  bool partitions_gradient(UnitId unit, std::size_t groups) const;
  // Whether that shard of the unit's parameters may be on disk, and what it takes there.
  bool may_store_shard(UnitId unit) const {
    return (compute_ == kCpuTier || shards_ == ShardPlace::kHost) && partitions_parameters(unit) &&
           shard_bytes(unit) > 0;
  }
  std::size_t shard_bytes(UnitId unit) const { return units_[unit].parameter_shard.disk; }

  // The bytes that one step reads from the disk tier, and writes there, for what is not resident.
  struct Traffic {
    std::uint64_t read = 0, written = 0;
    std::uint64_t total() const { return read + written; }
  };
  Traffic parameter_traffic(UnitId unit, std::size_t groups) const;
  // The same where a GPU computes: what comes to its frames in a step, and leaves them.
  Traffic parameter_traffic_of_gpu(UnitId unit, const UnitPlan& plan) const;
  // whole: where a GPU updates a part of what is on disk, which does not begin with a block.
  Traffic gradient_traffic(UnitId unit, std::size_t groups, bool whole = false) const;
  // What a sum over ranks at a step's end, in frames, moves of a gradient that waits on disk, beside that.
  Traffic summed_gradient_traffic(UnitId unit, const UnitPlan& plan) const;
  bool brings_whole_gradient(UnitId unit, const UnitPlan& plan) const {
    return stages_[unit] > 0 && plan.tier(Part::kGradient) == allocator::Tier::kDisk && compute_ != kCpuTier;
  }
  // The part of gradient_traffic() that comes from keeping a gradient while other uses and groups add to it.
  Traffic kept_gradient_traffic(UnitId unit, std::size_t groups) const;
  Traffic state_traffic(UnitId unit) const { return units_[unit].state_traffic; }
  // Returns the traffic of any part, as the plan has it; and the bytes of that part in memory.
  Traffic traffic(UnitId unit, Part part, const UnitPlan& plan, std::size_t groups, bool whole = false) const;
  std::size_t part_bytes(UnitId unit, Part part, const UnitPlan& plan) const;
  // Returns the traffic of a part on disk beside a GPU, with what depends on where an update finds it.
  Traffic disk_traffic_of_gpu(UnitId unit, Part part, const UnitPlan& plan) const;
  // Returns the bytes of a final gradient where it leaves the GPU.
  std::uint64_t moved_gradient_bytes(UnitId unit) const {
    return final_elements(unit) *
           size_of(sums_in_backward() ? final_gradient_type(profile_, unit) : moved_gradient_type(unit));
  }
  // The bytes that a step copies to a GPU (read) and from it, by the tiers of the plan; and those of them
  // that are for sums of gradients over ranks, and for gathers of what each has updated.
  Traffic link_traffic(UnitId unit, const UnitPlan& plan) const;
  // Returns the bytes that each fetch of partitioned parameters copies from the host to a GPU.
  std::uint64_t fetched_by_link(UnitId unit, const UnitPlan& plan) const {
    if (plan.shard_on_gpu()) return 0;
    return passes_shards() ? format_.shards().here(unit).size() * size_of(layout_.dtype(unit))
                           : parameter_bytes(unit);
  }
  PassedShards::Need passing() const { return passed_; }
  struct OfRanks {
    Traffic sum, gather;
    std::uint64_t kept = 0;  // bytes that leave after a sum
  };
  OfRanks link_traffic_of_ranks(UnitId unit, const UnitPlan& plan) const;
  // The bytes that the CPU reads and writes in host memory for sums and gathers, where ranks read each
  // other's shares there.
  struct Moved {
    std::uint64_t sum = 0, gather = 0;
  };
  Moved moved_of_shared(UnitId unit, const UnitPlan& plan) const;
  double update_seconds(UnitId unit, const MachineRates& rates) const;                        // by the CPU
  double update_seconds(UnitId unit, const UnitPlan& plan, const MachineRates& rates) const;  // by either
  // Returns the traffic of a shard of parameters on disk: for fetches of the unit, where all ranks share each
  // read of the disk; and for its update.
  std::uint64_t fetched_of_shard(UnitId unit, std::size_t groups) const {
    return units_[unit].at.fetches * groups * shard_bytes(unit);
  }
  Traffic shard_traffic(UnitId unit) const { return units_[unit].shard_traffic; }
  // Returns the additional bytes that a step reads where no two ranks share a read of a shard.
  std::uint64_t read_apart(const std::vector<UnitPlan>& units, std::size_t group) const;

  // Plan::relay_pieces. With more than the fewest, ranks of a host that are ahead of others by an access, and
  // by what they look ahead, have brought what these need. Other plans of wrapped models have as many.
  std::size_t relay_pieces(bool fewest) const {
    return relayed_.pieces * (fewest && !profile_.any_order ? 1 : kUnitsRelayed);
  }
  std::size_t relay_piece_bytes() const { return relayed_.bytes; }
  std::uint64_t relay_bytes(bool fewest) const {
    return round_up(relay_pieces(fewest) * relay_piece_bytes(), kHugePage);
  }

  // The bytes that this rank receives from the others for a unit in one step.
  struct Received {
    Arriving gradient;  // for the sum of its gradient, once all of it is final
    Arriving early;     // for uses of it that are final, and summed, before others
    Arriving updated;   // its parameters that the others have updated
    Arriving fetched;   // by each fetch of its parameters, where these are partitioned
  };
  // Where sums are by rows (rows_of_tokens()), the most that the tokens of a step can cause.
  Received received(UnitId unit, const UnitPlan& plan) const;
  bool comes_from_section(UnitId unit, int use) const;
  std::uint64_t received_of_sections() const;  // of a section of a pipeline, in a step
  std::uint64_t received_bytes(UnitId unit, const UnitPlan& plan, std::size_t groups) const;  // by this rank
  // Returns the bytes of these that come to its host from others, where the schedule is that of a step.
  std::uint64_t received_from_hosts(UnitId unit, const UnitPlan& plan) const;

  std::size_t chunks_of_typical_unit() const;  // of those that have state; 0: none has
  FrameNeeds frame_needs(const Lookahead& lookahead, std::size_t extent_bytes = kHugePage) const;
  Footprint footprint(const std::vector<UnitPlan>& units) const;
  // Puts a part into the memory of that tier; what is kept in shards, to the tier kRanks.
  void to_memory(UnitId unit, Part part, allocator::Tier tier, UnitPlan& plan, Footprint& footprint) const;
  // Whether loading or saving needs f32 memory that is neither parameter nor master.
  bool needs_scratch() const;

  // An index into UnitProfile::choices.
  std::size_t choice_of(UnitId unit, std::size_t level) const {
    return std::min(level, profile_.unit_profiles[unit].choices.size() - 1);
  }
  std::size_t activation_bytes(const std::vector<UnitPlan>& units, std::size_t group) const;
  std::size_t workspace_bytes(const std::vector<UnitPlan>& units) const;
  std::size_t sums_bytes() const;  // Plan::sums_bytes
  // Whether a sum over ranks may go on beside the next access: where each rank gives one array. In any order,
  // gradients that updates follow at once have frames.
  bool sums_go_on() const {
    if (ranks_.size == 1) return false;
    return profile_.any_order ? !clip_ || sums_in_backward() : sums_.height(sums_.count()) == 1;
  }
  // Plan::sums_in_backward, and whether this rank keeps its part alone of the unit's gradient then.
  bool sums_in_backward() const {
    const bool is_asked =
        sums_each_backward_ || (compute_ == allocator::Tier::kDevice && profile_.micro_batches == 1);
    return is_asked && ranks_.size > 1 && clip_ && profile_.ends_micro_batches && asks_for_parts_;
  }
  bool keeps_gradient_shard(UnitId unit) const;
  // Plan::sums_each_backward, and how often a step sums each gradient over the ranks.
  bool sums_each_backward() const { return sums_each_backward_ && sums_in_backward(); }
  std::size_t sums_in_step() const { return sums_each_backward() ? profile_.micro_batches : 1; }
  // Returns the bytes of that part in a record.
  std::size_t gradient_record_bytes(UnitId unit) const { return units_[unit].gradient_shard.disk; }
  // The accesses to a unit in the schedule.
  struct Positions {
    std::vector<std::size_t> parameters, gradient;
    std::size_t first = 0, last = 0;
    std::vector<std::size_t> last_writes;  // of its gradient, by use
    // By use: how many accesses of a group write it, and how many that end a step only add it to others.
    std::vector<std::size_t> writes, additions;
    std::size_t fetches = 0;  // how often one group fetches its parameters
  };
  // The seconds that each unit takes at a machine's rates.
  struct Times {
    double forward = 0, update = 0;
    double final = 0;              // for making its gradient final
    double weights = 0;            // of backward, in a pass of its own
    std::vector<double> backward;  // by activation choice
    // The seconds of these for messages of ranks that compute the micro-batch together.
    double forward_layers = 0;
    std::vector<double> backward_layers;
  };
  std::vector<Times> times(const MachineRates& rates) const;
  std::vector<Visit> visits(const std::vector<UnitPlan>& units, std::size_t group,
                            const std::vector<Times>& times) const {
    return visits(units, group, times, profile_.micro_batches);
  }
  // The same of a step of fewer micro-batches.
  std::vector<Visit> visits(const std::vector<UnitPlan>& units, std::size_t group,
                            const std::vector<Times>& times, std::size_t micro_batches) const;
  // The seconds of a unit's sum and gather, also where all threads of a rank read the others' shares
  // (RankMemory); and of a fetch.
  struct SecondsOfRanks {
    double sum = 0, gather = 0, fetch = 0;
  };
  SecondsOfRanks ranks_seconds(UnitId unit, const UnitPlan& plan, const MachineRates& rates) const;
  // Completes a plan for a GPU: what its step moves, and Plan::device_time; or, of the latter, how long the
  // step takes.
  void predict_on_gpu(const MachineRates& rates, std::optional<double> computing, Plan& plan) const;
  void walk_on_gpu(const MachineRates& rates, std::optional<double> computing, Plan& plan) const;
  // Adds up what a step of these visits moves.
  void count_bytes(const std::vector<Visit>& visits, Plan& plan) const;
  // The smallest chunk of which every update takes long enough at this machine's bandwidth of memory.
  std::size_t chunk_for(const MachineRates& rates) const;

 private:
  static constexpr std::size_t kUnitsRelayed = 4;  // at a time
  const Profile& profile_;
  bool clip_;
  allocator::Tier compute_;
  bool updates_by_gpu_;  // a GPU can update, and may
  ShardPlace shards_;    // where some are partitioned
  RankOf ranks_;
  std::vector<std::size_t> stages_;  // by unit
  bool asks_for_parts_;              // whether a stage is asked for at which gradients are partitioned
  bool sums_each_backward_;
  Layout layout_;
  std::vector<int> uses_;  // by unit: the uses of its gradient
  MicroBatchSums sums_;
  comm::Hosts hosts_;
  // An array of a sum over ranks that another rank sends: what it gives, or a whole sum of its host.
  struct SentArray {
    int from;
    bool is_whole;
  };
  // The arrays from other ranks that this rank's part of a sum takes; the number of arrays for each part that
  // it relays; the owners of these parts; and, for each rank of this host, the arrays that its part takes
  // from other hosts.
  std::vector<SentArray> own_arrays_;
  std::size_t relayed_arrays_ = 0;
  std::vector<int> relayed_owners_;
  std::vector<std::vector<SentArray>> from_hosts_;
  GivenElements given_;               // to these sums
  std::vector<std::size_t> buffers_;  // by unit: how many each use of its gradient has
  bool updated(UnitId unit) const { return uses_[unit] > 0; }
  bool has_shards(ShardPlace place) const { return shards_ == place && partitions_any_parameters(); }
  // The type in which a final gradient of the unit is moved. From a GPU it is the one in which it came, where
  // that is the only one of a step, and ranks do not send it; a sum over ranks is f32.
  Dtype moved_gradient_type(UnitId unit) const {
    return compute_ == allocator::Tier::kDevice && is_one_gradient() &&
                   (ranks_.size == 1 || reads_pieces(unit))
               ? layout_.dtype(unit)
               : final_gradient_type(profile_, unit);
  }
  // Whether what is summed, or updated, is the gradient of one micro-batch.
  bool is_one_gradient() const { return profile_.micro_batches == sums_in_step(); }
  Dtype updated_gradient_type(UnitId unit) const {
    return ranks_.size == 1 ? moved_gradient_type(unit) : final_gradient_type(profile_, unit);
  }
  bool gathers(UnitId unit, const UnitPlan& plan) const {
    return stages_[unit] > 0 && plan.tier(Part::kParameters) != allocator::Tier::kRanks;
  }
  bool sums_in_host(const UnitPlan& plan) const { return plan.sums_in_host(clip_ && !sums_in_backward()); }
  // Whether a final gradient of the unit waits for others.
  bool waits(UnitId unit) const { return clip_ || together_[unit]; }
  // The elements of which this rank stores the final gradient. In any order each rank keeps all of it.
  std::size_t final_elements(UnitId unit) const {
    return profile_.any_order ? layout_.unit_elements(unit) : format_.shards().here(unit).size();
  }
  // Whether the CPU updates what a GPU computes with, and whether some of it is not where it can do so.
  bool crosses(UnitId unit, const UnitPlan& plan) const {
    return updated(unit) && plan.updated_on != plan.compute;
  }
  bool streams_through_cpu(UnitId unit, const UnitPlan& plan) const {
    return crosses(unit, plan) && !(plan.resident(Part::kState) && !plan.shard_on_disk &&
                                    (plan.tier(Part::kParameters) == allocator::Tier::kHost ||
                                     plan.tier(Part::kParameters) == allocator::Tier::kRanks) &&
                                    plan.tier(Part::kGradient) == allocator::Tier::kHost &&
                                    (plan.gradient_stored || plan.gradient_in_shards));
  }
  // Whether an update changes parameters in a GPU's memory; see UpdateQueue::needs_frames().
  bool changes_on_gpu(UnitId unit, const UnitPlan& plan) const {
    const allocator::Tier tier = plan.tier(Part::kParameters);
    if (!crosses(unit, plan) || plan.resident(Part::kParameters)) return tier != allocator::Tier::kRanks;
    return stages_[unit] > 0 && tier == allocator::Tier::kDisk;
  }
  // How often an update reads the values of a bucket.
  std::uint64_t value_reads(UnitId unit, const Bucket& bucket) const;
  // Whether the unit's update, where the model is computed, streams anything.
  bool streams(UnitId unit, const UnitPlan& plan) const {
    return plan.updated_on == plan.compute && streams_parts(unit, plan);
  }
  bool streams_parts(UnitId unit, const UnitPlan& plan) const {
    return !plan.resident(Part::kState) || (plan.shard_on_disk && updated(unit)) ||
           plan.gradient_shard_in_record() ||
           (!plan.resident(Part::kGradient) && waits(unit) && plan.gradient_stored);
  }
  void add_computing(const std::vector<UnitPlan>& units, std::size_t group, const std::vector<Times>& times,
                     std::size_t all_micro_batches, std::vector<Visit>& visits) const;
  // A plan's step on a GPU, for engine::walk_on_gpu(), in which the client computes for so many seconds.
  std::vector<UnitOnGpu> units_on_gpu(const Plan& plan, const MachineRates& rates, double computing) const;
  GpuReach reach_on_gpu(const Plan& plan) const;
  // Calls body(parameter, StateFormat::update_bytes()) for each parameter that is updated.
  template <class Body>
  void for_each_updated(UnitId unit, const Body& body) const;
  // Bytes of one part of a unit: in memory, on disk, and in memory to describe what is on disk.
  struct Sizes {
    std::size_t own = 0, shared = 0, disk = 0, metadata = 0;
  };
  struct UnitCosts {
    std::array<Sizes, kParts> sizes;
    Sizes gradient_shard, parameter_shard;  // on disk
    Traffic state_traffic, shard_traffic;
    std::uint64_t elements_read = 0;       // of the gradient, by all rounds of its update
    std::vector<std::uint64_t> use_bytes;  // of its gradient buffers, by use
    Positions at;
  };
  void find_routes(const optim::Optimizer& optimizer);
  void count_in_host(Arriving& arriving) const;
  Arriving shards_of_others(UnitId unit) const;
  Arriving received_of_sum(UnitId unit, int use) const;
  Arriving read_by_gpu(UnitId unit) const;
  Arriving sent_by_nccl(UnitId unit) const;
  std::size_t elements_of_parameters(UnitId unit, const ElementRange& part) const;
  std::size_t sent_elements(UnitId unit, int use, const ElementRange& of) const;
  std::size_t sent_to(UnitId unit, int use, int owner) const;
  std::size_t sent_to(UnitId unit, int use, int owner, const std::vector<SentArray>& arrays) const;
  comm::Run part_of_sum(UnitId unit, int use, int owner) const;
  ElementRange shard_of(UnitId unit, int rank) const {
    return rank == ranks_.rank ? format_.shards().here(unit) : all_shards_->shard(unit, rank);
  }
  // Whether a use of the unit's gradient is summed before others of it are final.
  bool sums_early(UnitId unit, const UnitPlan& plan, int use) const;
  Traffic measured_shard_traffic(UnitId unit) const;
  // Adds to the footprint, so many times (-1: once less), what the unit, or the part, takes where the plan
  // puts it.
  void count(UnitId unit, const UnitPlan& plan, std::uint64_t times, Footprint& footprint) const;
  void count(UnitId unit, Part part, const UnitPlan& plan, std::uint64_t times, Footprint& footprint) const;
  void find_positions();
  void measure(UnitId unit);

  void find_relayed();
  void find_passed();

  StateFormat format_;
  std::optional<Shards> all_shards_;          // of all ranks, where these are on several hosts or pass some
  std::vector<std::vector<Bucket>> buckets_;  // by unit
  std::vector<bool> together_;                // by unit: whether it is updated jointly with others
  bool rounds_read_values_ = false;           // whether a round of a joint update reads values
  std::vector<bool> round_reads_values_;      // by round
  std::size_t whole_bytes_;
  RoundsNeed rounds_;
  RelayedShards::Need relayed_;        // of any one unit
  PassedShards::Need passed_;          // of the largest
  std::vector<double> product_flops_;  // by unit: operations of matrix products in its update
  std::vector<UnitCosts> units_;
};

}  // namespace sluice::engine
