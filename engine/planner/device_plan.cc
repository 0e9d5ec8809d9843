#include "engine/planner/device_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/gradients/device_gradients.h"
#include "engine/memory/device_disk.h"
#include "engine/memory/device_ranks.h"
#include "engine/memory/device_shards.h"
#include "engine/memory/host_staging.h"
#include "engine/memory/pager.h"
#include "engine/planner/device_walk.h"
#include "engine/planner/placement.h"
#include "engine/planner/shared_updates.h"
#include "engine/planner/shortage.h"
#include "engine/updates/update_pipeline.h"
#include "optim/elementwise.h"

namespace sluice::engine {
namespace {

using allocator::Purpose;
using allocator::Tier;

// One slot comes in, one is updated and one goes out; where there is room, one more waits.
constexpr std::size_t kLeastSlots = 3, kMostSlots = 4;
// The CPU's slots are as many where memory is short. Otherwise some more than chunks that it updates at a
// time come in and go out meanwhile.
constexpr std::size_t kMoreHostSlots = 8;
// What is on the GPU may take one part in so many more with larger extents than with the smallest, and so
// may the frames that all that is elsewhere would take together.
constexpr std::uint64_t kExtentWaste = 16;

// The largest unit has at least so many chunks, so that their copies and updates run side by side; all slots
// may have one part in so many of the memory that is stated.
constexpr std::size_t kLeastChunks = 16;
constexpr std::uint64_t kSlotsShare = 64;

// Gains of at least this part of the greatest are alike.
constexpr double kAlike = 0.98;

constexpr std::uint64_t kAnyDisk = std::numeric_limits<std::uint64_t>::max();

std::size_t most_host_slots(const MachineRates& rates) {
  return static_cast<std::size_t>(chunks_at_a_time(rates.cores)) + kMoreHostSlots;
}

std::uint64_t sum(const auto& bytes) { return std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0}); }

PlanRequest on_device(const Profile& profile, const PlanRequest& request) {
  if (request.reproducible)
    fail(ErrorCode::kInvalidArgument,
         "device memory is given to a reproducible run, which the CPU computes; leave one of them out");
  if (!profile.any_order)
    fail(ErrorCode::kInvalidArgument,
         "device memory is given to a native model, which the CPU computes; leave it out");
  PlanRequest result = request;
  result.compute = Tier::kDevice;
  if (request.ranks.size == 1) result.stage = 0;
  return result;
}

class DevicePlanner {
 public:
  explicit DevicePlanner(const PlanInputs& in)
      : in_(in),
        placement_(in.profile, in.optimizer, in.request),
        updated_on_(in.profile.units.size(), Tier::kDevice),
        gradients_on_gpu_(round_up(DeviceGradients::device_bytes(placement_.layout()), kHugePage)),
        gradients_on_host_(round_up(DeviceGradients::host_bytes(placement_.layout()), kHugePage)) {}

  Plan best() {
    std::optional<Plan> plan = find();
    if (!plan) refuse();
    return *plan;
  }
  std::optional<Plan> find() {
    const bool by_gpu = in_.optimizer.elementwise({}).has_value();
    check_updates(by_gpu);
    keep_shards_with_the_cpu();
    if (!by_gpu || in_.request.updates) {
      const Tier by = in_.request.updates.value_or(Tier::kHost);
      std::ranges::fill(updated_on_, by);
      because_ = fmt::format("the {}, {}", by == Tier::kHost ? "CPU" : "GPU",
                             in_.request.updates
                                 ? "as asked"
                                 : "since " + in_.optimizer.name() + " looks at each parameter as a whole");
    }
    std::optional<Plan> plan = attempt(in_.budget.disk);
    const bool may_share = !placement_.partitions_any_parameters();
    if (by_gpu && !in_.request.updates && may_share)
      if (const std::optional<Plan> alone = plan ? plan : attempt(kAnyDisk)) share(*alone, plan);
    if (plan) engine::predict_step(placement_, in_.rates, in_.request.computing, *plan);
    return plan;
  }

 private:
  // Replaces the plan by one in which the CPU updates, too, unless that uses a disk and the plan does not.
  // alone: a plan by which the GPU updates everything.
  void share(const Plan& alone, std::optional<Plan>& plan) {
    const auto before = std::pair(updated_on_, because_);
    Plan both = alone;
    both.host_slots = most_host_slots(in_.rates);
    std::tie(updated_on_, because_) =
        share_updates(placement_, in_.rates, both, in_.request.computing.value_or(0));
    std::optional<Plan> shared = attempt(in_.budget.disk);
    if (shared && (!plan || plan->uses_disk() || !shared->uses_disk()))
      plan = std::move(shared);
    else if (plan)
      plan->updates_because = "the GPU, since memory is too short for updates by the CPU beside it";
    std::tie(updated_on_, because_) = before;
  }

  void check_updates(bool by_gpu) const {
    if (in_.request.updates == Tier::kDevice && !by_gpu)
      fail(ErrorCode::kInvalidArgument,
           "updates on the GPU are asked for, and {} looks at each parameter as a whole, which only the CPU "
           "does; let the CPU update, or choose adamw, adam, lion or sgd",
           in_.optimizer.name());
    if (in_.request.place(Part::kState) == Tier::kDevice && (in_.request.updates == Tier::kHost || !by_gpu))
      fail(ErrorCode::kInvalidArgument,
           "optimizer state on the GPU is asked for, and the CPU updates; leave the state in memory or on "
           "disk");
  }

  // Where GPUs do not copy shards of parameters from each other, these are in host memory, from where all
  // ranks read them.
  void keep_shards_with_the_cpu() {
    if (!placement_.partitions_any_parameters() || placement_.shards_on_gpus()) return;
    if (in_.request.updates == Tier::kDevice)
      fail(ErrorCode::kInvalidArgument,
           "updates on the GPU are asked for at stage 3, at which the CPU updates each rank's shard of the "
           "parameters, in host memory, unless all ranks have theirs on GPUs that read each other's memory; "
           "let "
           "the CPU update, or ask for stage 1");
    for (UnitId unit = 0; unit < updated_on_.size(); ++unit)
      if (placement_.partitions_parameters(unit)) updated_on_[unit] = Tier::kHost;
    because_ = "the CPU where parameters are partitioned, and else the GPU";
  }

  // One way to use the GPU's memory.
  struct Shape {
    Lookahead lookahead;
    std::size_t slots, host_slots;
  };

  std::vector<Shape> shapes() const {
    std::vector<Shape> result;
    for (const Lookahead& lookahead : lookaheads())
      for (const auto& [slots, host_slots] :
           {std::pair{kMostSlots, most_host_slots(in_.rates)}, {kLeastSlots, kLeastSlots}})
        result.push_back({lookahead, slots, host_slots});
    return result;
  }

  // What of all that is elsewhere is in host memory: all that may be there; all but what the CPU alone uses;
  // or nothing. What is on disk passes through memory that is there while anything is, so that the last parts
  // may fit into memory together where none of them would alone.
  enum class InMemory { kAll, kAllButCpuState, kNothing };

  // Disks are slow, so any plan that does without is better than one that does not.
  std::optional<Plan> attempt(std::uint64_t disk) const {
    if (Plan plan = all_on_gpu(); plan.device_bytes <= in_.budget.device && fits(plan, disk)) return plan;
    for (const bool with_disk : {false, true})
      for (const Shape& shape : shapes())
        if (const std::optional<Plan> on_gpu = fill_gpu(shape, with_disk))
          if (Plan plan = in_memory(*on_gpu, shape, InMemory::kAll); fits(plan, disk)) return plan;
    for (const Shape& shape : shapes())
      if (const std::optional<Plan> on_gpu = fill_gpu(shape, true))
        for (const InMemory least : {InMemory::kAllButCpuState, InMemory::kNothing}) {
          Plan plan = in_memory(*on_gpu, shape, least);
          if (plan.peak_memory > in_.budget.memory) continue;
          fill_host(plan, shape);
          if (fits(plan, disk)) return plan;
        }
    return std::nullopt;
  }

  // The plan with everything on the GPU. It needs neither frames nor slots, so it may fit where no plan does
  // that leaves a little elsewhere.
  Plan all_on_gpu() const { return describe(shapes().front(), units(Tier::kDevice)); }

  struct Item {
    UnitId unit;
    Part part;
    double gain;  // seconds of copies and of the disk that are saved for each byte of memory
  };

  std::vector<Lookahead> lookaheads() const {
    std::vector<Lookahead> all = {{2, true}, {1, true}, {1, false}};
    if (const auto& prefetch = in_.request.prefetch) all = {{*prefetch, true}, {*prefetch, false}};
    for (Lookahead& each : all) each.sums = placement_.sums_go_on();
    return all;
  }

  std::size_t bytes_of(UnitId unit, Part part) const {
    if (part == Part::kParameters) return placement_.parameter_bytes(unit);
    if (part == Part::kGradient && placement_.keeps_gradient_shard(unit))
      return placement_.gradient_record_bytes(unit);
    return part == Part::kGradient ? placement_.gradient_bytes(unit) : placement_.state_bytes(unit);
  }

  std::vector<UnitPlan> units(Tier rest) const {
    std::vector<UnitPlan> units(in_.profile.units.size());
    for (UnitId unit = 0; unit < units.size(); ++unit) {
      units[unit].compute = Tier::kDevice;
      units[unit].stage = placement_.stage(unit);
      units[unit].updated_on = updated_on_[unit];
      const Tier chosen = is_packed(placement_.parameter_bytes(unit)) ? Tier::kDevice : rest;
      for (const Part part : {Part::kParameters, Part::kGradient, Part::kState}) {
        const bool by_cpu = part == Part::kState && units[unit].updated_by_cpu();
        const Tier best = by_cpu ? Tier::kHost : Tier::kDevice;
        const Tier usual = !by_cpu ? chosen : rest == Tier::kDevice ? best : rest;
        // State of shards, which are in host memory, cannot be on the GPU.
        const Tier wanted = in_.request.place(part).value_or(usual);
        const bool can_be = bytes_of(unit, part) > 0 && !(by_cpu && wanted == Tier::kDevice);
        units[unit].place(part, can_be ? wanted : best);
      }
      if (placement_.partitions_parameters(unit)) units[unit].place(Part::kParameters, Tier::kRanks);
      units[unit].gradient_stored =
          placement_.gradient_bytes(unit) == 0 || placement_.stores_gradient(unit, 1);
      if (!units[unit].gradient_stored) units[unit].place(Part::kGradient, Tier::kHost);
      if (placement_.keeps_gradient_shard(unit)) {
        units[unit].gradient_in_shards = true;
        units[unit].gradient_stored = false;
        const Tier wanted = in_.request.place(Part::kGradient).value_or(rest);
        const bool on_gpu = wanted == Tier::kDevice && !units[unit].updated_by_cpu();
        units[unit].place(Part::kGradient, on_gpu ? Tier::kRanks : Tier::kHost);
      }
    }
    return units;
  }

  // whole: see Placement::gradient_traffic().
  Placement::Traffic traffic(UnitId unit, Part part, bool whole) const {
    if (part == Part::kParameters) return placement_.parameter_traffic(unit, placement_.micro_batches());
    if (part == Part::kGradient && placement_.keeps_gradient_shard(unit))
      return {placement_.gradient_record_bytes(unit), placement_.gradient_record_bytes(unit)};
    if (part == Part::kGradient) return placement_.gradient_traffic(unit, placement_.micro_batches(), whole);
    return placement_.state_traffic(unit);
  }

  std::vector<Item> items(const std::vector<UnitPlan>& units, bool with_disk) const {
    std::vector<Item> result;
    for (UnitId unit = 0; unit < units.size(); ++unit)
      for (const Part part : {Part::kParameters, Part::kGradient, Part::kState}) {
        const bool in_shards = part == Part::kGradient && units[unit].gradient_in_shards;
        const bool is_fixed = in_.request.place(part) || units[unit].tier(part) == Tier::kRanks ||
                              (part == Part::kGradient && !units[unit].gradient_stored && !in_shards);
        if (units[unit].resident(part) || is_fixed) continue;
        const bool whole = with_disk && units[unit].stage > 0;
        const Placement::Traffic saved = traffic(unit, part, whole);
        double seconds = copy_seconds(saved.read, saved.written, in_.rates.gpu);
        if (with_disk) seconds += disk_seconds(saved.read, saved.written, in_.rates);
        if (seconds > 0) result.push_back({unit, part, seconds / static_cast<double>(bytes_of(unit, part))});
      }
    std::ranges::stable_sort(result, std::greater<>(), &Item::gain);
    // Of those that save as much, but for what padding takes, the first ones: backward ends with them, and
    // the next step begins with them, so that nothing else goes on beside their updates.
    for (auto begin = result.begin(); begin != result.end();) {
      const auto is_less = [least = kAlike * begin->gain](const Item& item) { return item.gain < least; };
      const auto end = std::find_if(begin, result.end(), is_less);
      std::stable_sort(begin, end, [](const Item& a, const Item& b) { return a.unit < b.unit; });
      begin = end;
    }
    return result;
  }

  // A plan with as much on the GPU as fits there, and the rest on disk, where it may be there. with_disk:
  // whether what saves most is found for a plan that uses the disk.
  std::optional<Plan> fill_gpu(const Shape& shape, bool with_disk) const {
    const Lookahead& lookahead = shape.lookahead;
    Plan plan = describe(shape, units(Tier::kDisk));
    if (plan.device_bytes > in_.budget.device) return std::nullopt;
    const FrameNeeds needs = placement_.frame_needs(lookahead);
    Frames frames(needs, plan.units);
    Footprint footprint = placement_.footprint(plan.units);
    for (const Item& item : items(plan.units, with_disk)) {
      UnitPlan larger = plan.units[item.unit];
      // The CPU has state in host memory, and gradients are copied there in any case.
      if (larger.updated_by_cpu() && item.part != Part::kParameters) continue;
      Footprint then = footprint;
      placement_.to_memory(item.unit, item.part, larger, then);
      const bool is_part = item.part == Part::kGradient && larger.gradient_in_shards;
      const bool frees_frames = item.part != Part::kState && !is_part;
      const std::size_t extents = frees_frames ? frames.most_without(item.unit, item.part) : frames.most();
      if (sum(device_bytes(plan, shape, then, extents)) > in_.budget.device) continue;
      if (frees_frames) frames.remove(item.unit, item.part);
      plan.units[item.unit] = larger;
      footprint = then;
    }
    const std::size_t extents = enlarge_extents(plan, shape, footprint, frames.most());
    predict(plan, shape, footprint, extents);
    return plan;
  }

  // Takes the largest extents with which all that is on the GPU still fits there, and with which neither that
  // nor the frames of all that is elsewhere are much larger. Returns how many are needed.
  std::size_t enlarge_extents(Plan& plan, const Shape& shape, const Footprint& footprint,
                              std::size_t smallest) const {
    const Lookahead& lookahead = shape.lookahead;
    const auto frames_of_all = [&](const FrameNeeds& needs, std::size_t extent_bytes) {
      std::uint64_t extents = 0;
      for (UnitId unit = 0; unit < plan.units.size(); ++unit)
        for (const Part part : {Part::kParameters, Part::kGradient})
          if (!plan.units[unit].resident(part)) extents += needs.extents[index(part)][unit];
      return extents * extent_bytes;
    };
    const auto most = [](std::uint64_t smallest_take) {
      return smallest_take + smallest_take / kExtentWaste;
    };
    const std::uint64_t elsewhere = most(frames_of_all(placement_.frame_needs(lookahead), kHugePage));
    const std::uint64_t here =
        std::min(in_.budget.device, most(sum(device_bytes(plan, shape, footprint, smallest))));
    for (std::size_t bytes = kLargestExtentBytes; bytes > kHugePage; bytes /= 2) {
      const FrameNeeds needs = placement_.frame_needs(lookahead, bytes);
      const std::size_t extents = Frames(needs, plan.units).most();
      Plan larger = plan;
      larger.extent_bytes = bytes;
      if (frames_of_all(needs, bytes) > elsewhere ||
          sum(device_bytes(larger, shape, footprint, extents)) > here)
        continue;
      plan.extent_bytes = bytes;
      return extents;
    }
    return smallest;
  }

  // Whether the plan has put the part on disk, and not the request.
  bool is_movable(const UnitPlan& plan, Part part) const {
    return plan.tier(part) == Tier::kDisk && !in_.request.place(part);
  }
  Plan in_memory(Plan plan, const Shape& shape, InMemory what) const {
    for (UnitPlan& unit : plan.units)
      for (const Part part : {Part::kParameters, Part::kGradient, Part::kState}) {
        const bool is_cpu_state = part == Part::kState && unit.updated_by_cpu();
        if (what == InMemory::kAll || (what == InMemory::kAllButCpuState && !is_cpu_state))
          if (is_movable(unit, part)) unit.place(part, Tier::kHost);
      }
    predict_host(plan, shape, placement_.footprint(plan.units));
    return plan;
  }

  // Puts what is on disk into host memory while it fits, first what saves most traffic for its bytes.
  void fill_host(Plan& plan, const Shape& shape) const {
    Footprint footprint = placement_.footprint(plan.units);
    for (const Item& item : items(plan.units, true)) {
      UnitPlan& unit = plan.units[item.unit];
      if (!is_movable(unit, item.part)) continue;
      UnitPlan moved = unit;
      Footprint then = footprint;
      placement_.to_memory(item.unit, item.part, Tier::kHost, moved, then);
      if (sum(host_bytes(shape, then)) > in_.budget.memory) continue;
      unit = moved;
      footprint = then;
    }
    predict_host(plan, shape, footprint);
  }

  bool fits(const Plan& plan, std::uint64_t disk) const {
    return plan.peak_memory <= in_.budget.memory && plan.disk_bytes <= disk;
  }

  Plan describe(const Shape& shape, std::vector<UnitPlan> units) const {
    Plan plan;
    plan.ranks = in_.request.ranks;
    plan.knows_link = in_.rates.link.has_value();
    plan.sums_beside = shape.lookahead.sums;
    plan.sums_in_backward = placement_.sums_in_backward();
    plan.clip = in_.request.clip;
    plan.prefetch = shape.lookahead.prefetch;
    plan.extent_bytes = kHugePage;
    plan.chunk_elements = placement_.format().shards().chunk_elements();
    plan.state_bytes_per_parameter = placement_.element_bytes();
    plan.units = std::move(units);
    const FrameNeeds needs = placement_.frame_needs(shape.lookahead);
    predict(plan, shape, placement_.footprint(plan.units), Frames(needs, plan.units).most());
    return plan;
  }

  using Bytes = std::array<std::uint64_t, allocator::kPurposes>;
  static std::size_t slots_of(const Shape& shape, const Footprint& footprint) {
    return footprint.streamed > 0 ? shape.slots : 0;
  }
  static std::size_t host_slots_of(const Shape& shape, const Footprint& footprint) {
    return footprint.cpu_streamed > 0 ? shape.host_slots : 0;
  }

  // Calls body() for what ranks sum, and for what they gather.
  template <class Body>
  void for_each_of_ranks(const Body& body) const {
    if (in_.request.ranks.size > 1) body(DeviceRanks::Of::kGradients);
    if (placement_.gathers_any()) body(DeviceRanks::Of::kParameters);
  }

  static std::uint64_t shards(const Footprint& footprint, bool here) {
    return here ? round_up(footprint.shards[index(Part::kParameters)], kHugePage) : 0;
  }

  Bytes device_bytes(const Plan& plan, const Shape& shape, const Footprint& footprint,
                     std::size_t extents) const {
    Bytes bytes = {};
    bytes[index(Purpose::kParameter)] = footprint.memory(Part::kParameters) + extents * plan.extent_bytes +
                                        shards(footprint, placement_.shards_on_gpus());
    bytes[index(Purpose::kGradient)] =
        footprint.memory(Part::kGradient) + round_up(footprint.shards[index(Part::kGradient)], kHugePage);
    bytes[index(Purpose::kOptimizerState)] = footprint.memory(Part::kState);
    bytes[index(Purpose::kStaging)] =
        round_up(slots_of(shape, footprint) *
                     UpdatePipeline::slot_bytes(placement_.format(), placement_.layout(), false),
                 kHugePage);
    for_each_of_ranks([&](DeviceRanks::Of kind) {
      bytes[index(Purpose::kStaging)] +=
          DeviceRanks::device_bytes(placement_.layout(), kind, placement_.meeting());
    });
    const PassedShards::Need passing = placement_.passing();
    bytes[index(Purpose::kStaging)] += round_up(passing.places * passing.bytes, kHugePage);
    bytes[index(Purpose::kWorkspace)] = gradients_on_gpu_;
    bytes[index(Purpose::kBase)] = in_.budget.device_base;
    return bytes;
  }

  Bytes host_bytes(const Shape& shape, const Footprint& footprint) const {
    Bytes bytes = {};
    const auto of = [&](Part part) { return round_up(footprint.host[index(part)], kHugePage); };
    bytes[index(Purpose::kParameter)] =
        of(Part::kParameters) + shards(footprint, !placement_.shards_on_gpus());
    bytes[index(Purpose::kGradient)] = of(Part::kGradient);
    bytes[index(Purpose::kOptimizerState)] = of(Part::kState) + round_up(footprint.cpu_state, kHugePage) +
                                             round_up(placement_.whole_bytes(), kHugePage);
    bytes[index(Purpose::kStaging)] =
        round_up(HostStaging::bytes(placement_.format()), kHugePage) +
        round_up(host_slots_of(shape, footprint) * UpdatePipeline::cpu_slot_bytes(placement_.format(),
                                                                                  placement_.layout(),
                                                                                  footprint.cpu_disk > 0),
                 kHugePage);
    for_each_of_ranks([&](DeviceRanks::Of kind) {
      bytes[index(Purpose::kStaging)] += DeviceRanks::bytes(placement_.layout(), kind, placement_.meeting());
    });
    if (placement_.partitions_any_parameters() && !placement_.copies_shards())
      bytes[index(Purpose::kStaging)] +=
          round_up(DeviceShards::bytes(), kHugePage) + placement_.relay_bytes(false);
    if (sum(footprint.disk) > footprint.cpu_disk)
      bytes[index(Purpose::kStaging)] += round_up(
          DeviceDisk::bytes(DeviceDisk::piece_bytes(placement_.layout(), placement_.format())), kHugePage);
    bytes[index(Purpose::kWorkspace)] =
        gradients_on_host_ + in_.profile.hidden_bytes + round_up(placement_.rounds().bytes, kHugePage);
    bytes[index(Purpose::kBase)] = in_.budget.base + footprint.metadata;
    return bytes;
  }

  void predict(Plan& plan, const Shape& shape, const Footprint& footprint, std::size_t extents) const {
    plan.extents = extents;
    plan.staging_slots = slots_of(shape, footprint);
    plan.updates_because = because_;
    plan.bytes[index(Tier::kDevice)] = device_bytes(plan, shape, footprint, extents);
    plan.device_bytes = sum(plan.bytes[index(Tier::kDevice)]);
    predict_host(plan, shape, footprint);
  }

  // What of a plan changes with what is in host memory, and not on disk.
  void predict_host(Plan& plan, const Shape& shape, const Footprint& footprint) const {
    plan.relay_pieces = placement_.relay_pieces(false);
    plan.relay_piece_bytes = placement_.relay_piece_bytes();
    plan.passing_places = placement_.passing().places;
    plan.passing_place_bytes = placement_.passing().bytes;
    plan.host_slots = host_slots_of(shape, footprint);
    plan.bytes[index(Tier::kHost)] = host_bytes(shape, footprint);
    Bytes& disk = plan.bytes[index(Tier::kDisk)];
    disk[index(Purpose::kParameter)] = footprint.disk[index(Part::kParameters)];
    disk[index(Purpose::kGradient)] = footprint.disk[index(Part::kGradient)];
    disk[index(Purpose::kOptimizerState)] = footprint.disk[index(Part::kState)];
    plan.disk_bytes = sum(disk);
    plan.peak_memory = sum(plan.bytes[index(Tier::kHost)]);
    predict_step(plan);
  }

  void predict_step(Plan& plan) const {
    plan.step_bytes_read = plan.step_bytes_written = 0;
    plan.step_bytes_received = plan.step_bytes_from_hosts = 0;
    Beside all;
    for (UnitId unit = 0; unit < plan.units.size(); ++unit) {
      all.add(Beside(placement_, in_.rates, unit, plan.units[unit]));
      plan.step_bytes_received +=
          placement_.received_bytes(unit, plan.units[unit], placement_.micro_batches());
      plan.step_bytes_from_hosts += placement_.received_from_hosts(unit, plan.units[unit]);
      for (const Part part : {Part::kParameters, Part::kGradient, Part::kState}) {
        if (plan.units[unit].tier(part) != Tier::kDisk) continue;
        const Placement::Traffic moved =
            traffic(unit, part, placement_.brings_whole_gradient(unit, plan.units[unit]));
        plan.step_bytes_read += moved.read;
        plan.step_bytes_written += moved.written;
      }
    }
    plan.step_bytes_in = all.copied.read;
    plan.step_bytes_out = all.copied.written;
    plan.device_time = {all.copying(in_.rates),
                        all.gpu,
                        all.cpu,
                        disk_seconds(plan.step_bytes_read, plan.step_bytes_written, in_.rates),
                        all.ranks,
                        in_.rates.gpu,
                        in_.rates.memory_bandwidth};
  }

  // Of the plans that fit on the GPU, the one that takes least host memory.
  Plan least(std::initializer_list<bool> orders, std::initializer_list<InMemory> ways) const {
    std::optional<Plan> least;
    if (Plan all = all_on_gpu(); all.device_bytes <= in_.budget.device) least = std::move(all);
    for (const bool with_disk : orders)
      for (const Shape& shape : shapes())
        if (const std::optional<Plan> on_gpu = fill_gpu(shape, with_disk))
          for (const InMemory way : ways)
            if (Plan plan = in_memory(*on_gpu, shape, way); !least || plan.peak_memory < least->peak_memory)
              least = std::move(plan);
    return *least;
  }

  [[noreturn]] void refuse() const {
    const std::uint64_t all_elsewhere = describe(shapes().back(), units(Tier::kDisk)).device_bytes;
    const std::uint64_t all_there = all_on_gpu().device_bytes;
    if (std::min(all_elsewhere, all_there) > in_.budget.device)
      refuse_device_memory(in_.budget, all_elsewhere, all_there);
    refuse_beside_gpu({in_.profile, in_.request, in_.budget, in_.optimizer.name(), placement_,
                       LeastOfRanks(least({false, true}, {InMemory::kAll})),
                       LeastOfRanks(least({true}, {InMemory::kAllButCpuState, InMemory::kNothing}))},
                      attempt(kAnyDisk));
  }

  const PlanInputs in_;
  Placement placement_;
  std::vector<Tier> updated_on_;                              // by unit
  const std::uint64_t gradients_on_gpu_, gradients_on_host_;  // the bytes that DeviceGradients take
  std::string because_ = "the GPU";
};

// A chunk costs a dozen calls of the driver, whatever its size, and what a client queues waits behind those
// of a unit's chunks: the driver has about 1,000 places for what is queued, and then lets the caller wait.
std::size_t larger_chunk(const PlanInputs& in, PlanRequest at, std::size_t elements) {
  const Layout layout(in.profile.units);
  std::size_t most = 0;
  for (UnitId unit = 0; unit < layout.units().size(); ++unit)
    most = std::max(most, layout.unit_elements(unit));
  for (std::size_t larger = 2 * elements; larger <= kMostChunk && larger * kLeastChunks <= most;
       larger *= 2) {
    at.chunk_elements = larger;
    const Placement placement(in.profile, in.optimizer, at);
    const std::size_t slot = UpdatePipeline::slot_bytes(placement.format(), layout, false);
    const std::size_t slot_of_cpu = UpdatePipeline::cpu_slot_bytes(placement.format(), layout, true);
    if (kMostSlots * slot > in.budget.device / kSlotsShare ||
        most_host_slots(in.rates) * slot_of_cpu > in.budget.memory / kSlotsShare)
      break;
    elements = larger;
  }
  return elements;
}

}  // namespace

namespace {

// At the stage that is asked for.
std::optional<Plan> find_at(const PlanInputs& in) {
  PlanRequest at = in.request;
  if (at.chunk_elements) return DevicePlanner(in).find();
  const std::size_t least = Placement(in.profile, in.optimizer, at).chunk_for(in.rates);
  at.chunk_elements = larger_chunk(in, at, least);
  if (*at.chunk_elements > least)
    if (std::optional<Plan> plan = DevicePlanner(in.with(at)).find(); plan && !plan->uses_disk()) return plan;
  at.chunk_elements = least;
  return DevicePlanner(in.with(at)).find();
}

// The stages that may be, and with each where shards may lie.
std::vector<PlanRequest> requests_for(const PlanInputs& in, const PlanRequest& asked) {
  std::vector<PlanRequest> requests;
  const auto add = [&](const PlanRequest& request) {
    const Placement first(in.profile, in.optimizer, request);
    if (!first.partitions_any_parameters()) return requests.push_back(request);
    for (const ShardPlace shards : {ShardPlace::kGpu, ShardPlace::kPassed, ShardPlace::kHost}) {
      if (shards < first.shards() || shards != request.shards.value_or(shards)) continue;
      if (first.shards_on_gpus() && shards != ShardPlace::kGpu && request.updates == Tier::kDevice) continue;
      requests.push_back(request);
      requests.back().shards = shards;
    }
  };
  const bool gives_stage = asked.stage || !asked.stages.empty();
  if (gives_stage) add(asked);
  for (const std::size_t stage : {std::size_t{0}, std::size_t{1}, kMostStage}) {
    if (gives_stage) break;
    PlanRequest at = asked;
    at.stages.assign(in.profile.units.size(), stage);
    if (stage < kMostStage || at.updates != Tier::kDevice || at.ranks.gpus_meet) add(at);
  }
  return requests;
}

// The one with the shortest step with which nothing is on disk, and of those that are alike the first one; or
// else the one that moves least from the disk and to it.
std::optional<Plan> best_of(const PlanInputs& in, const std::vector<PlanRequest>& requests) {
  const auto moved = [](const Plan& of) { return of.step_bytes_read + of.step_bytes_written; };
  const auto is_better = [&](const Plan& plan, const Plan& than) {
    if (plan.uses_disk() || than.uses_disk()) return moved(plan) < moved(than);
    return plan.device_time.step < kAlike * than.device_time.step;
  };
  std::optional<Plan> best;
  for (const PlanRequest& request : requests) {
    std::optional<Plan> plan = find_at(in.with(request));
    if (plan && (!best || is_better(*plan, *best))) best = std::move(plan);
  }
  return best;
}

// Where parts of gradients do not fit in memory, or are asked to be on disk, gradients stay whole. Changes
// `asked` to what was tried last.
std::optional<Plan> find_for(const PlanInputs& in, PlanRequest& asked) {
  asked.whole_gradients = asked.place(Part::kGradient) == Tier::kDisk;
  std::optional<Plan> best = best_of(in, requests_for(in, asked));
  if (!best && !std::exchange(asked.whole_gradients, true)) best = best_of(in, requests_for(in, asked));
  return best;
}

// Of two plans that differ in what joins the GPUs.
bool is_joined_better(const Plan& plan, const Plan& than) {
  if (plan.uses_disk() != than.uses_disk()) return than.uses_disk();
  return plan.device_time.step < kAlike * than.device_time.step;
}

// Whether ranks with GPUs that meet may do without: GPUs do not update shards of the host's.
bool may_join_by_host(const PlanRequest& asked) {
  const bool has_shards = asked.stage == kMostStage || std::ranges::count(asked.stages, kMostStage) > 0;
  return asked.chooses_links && asked.ranks.gpus_meet && !(has_shards && asked.updates == Tier::kDevice);
}

}  // namespace

Plan make_device_plan(const PlanInputs& in) {
  PlanRequest asked = on_device(in.profile, in.request);
  std::optional<Plan> best = find_for(in, asked);
  if (may_join_by_host(asked)) {
    asked.ranks.gpus_meet = false;
    std::optional<Plan> in_host = find_for(in, asked);
    if (best && !in_host) best->needs_gpus_to_meet = true;
    if (in_host && (!best || is_joined_better(*in_host, *best))) best = std::move(in_host);
  }
  if (best) return *best;
  PlanRequest at = requests_for(in, asked).back();
  if (!at.chunk_elements) at.chunk_elements = Placement(in.profile, in.optimizer, at).chunk_for(in.rates);
  return DevicePlanner(in.with(at)).best();
}

}  // namespace sluice::engine
