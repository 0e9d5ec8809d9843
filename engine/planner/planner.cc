#include "engine/planner/planner.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/memory/pager.h"
#include "engine/planner/largest_ranks.h"
#include "engine/planner/shared_updates.h"
#include "engine/planner/shortage.h"
#include "engine/planner/stages.h"
#include "engine/planner/tiers.h"
#include "engine/updates/update_pipeline.h"
#include "optim/elementwise.h"

namespace sluice::engine {
namespace {

using allocator::Tier;

constexpr std::size_t kMostStagingSlots = 32;
constexpr std::size_t kWalkedGroups = 64, kLastGroups = 16;  // of a step of more, for its time
constexpr double kRounding = 1e-9;                           // relative error of a sum in another order

// Finds the fastest way to run a step where the CPU computes.
class Planner {
 public:
  explicit Planner(const PlanInputs& in)
      : in_(in),
        tiers_(in),
        times_(tiers_.placement().times(in.rates)),
        levels_(recompute_levels(in.profile, in.request.recompute)) {
    if (in_.request.group && (*in_.request.group == 0 || *in_.request.group > in_.profile.micro_batches))
      fail(ErrorCode::kInvalidArgument, "a group of {} micro-batches is asked for, and a step has {}",
           *in_.request.group, in_.profile.micro_batches);
  }

  std::optional<Plan> find() const {
    std::optional<Plan> best;
    std::vector<std::optional<Plan>> last(tiers_.lookaheads().size());  // by look-ahead
    for (const std::size_t group : group_sizes()) {
      const Start start(*this, in_.profile.repeats(group));
      for (const Shape& shape : shapes(group)) {
        if (best && computing(shape.level) > (1 + kSame + kRounding) * best->time.step) continue;
        for (const bool parameters_first : {false, true}) {
          std::optional<Plan> plan = fill(shape, start, parameters_first);
          if (!plan) continue;
          predict_time(*plan, shape.lookahead, last[shape.ahead]);
          last[shape.ahead] = *plan;
          if (!best || faster(*plan, *best)) best = std::move(plan);
        }
      }
    }
    return best;
  }

  // The plans of this group that take least memory: with all of it there, and with everything on disk that
  // can be.
  struct Least {
    Plan in_memory, on_disk;
  };
  // REQUIRES: the group is given.
  Least least() const {
    const Start start(*this, in_.profile.repeats(*in_.request.group));
    std::optional<Plan> in_memory, on_disk;
    for (const Shape& shape : shapes(*in_.request.group)) {  // to recompute more may take more workspace
      const auto keep_less = [&](std::optional<Plan>& least, const Tiers::Placed& placed) {
        Plan plan = tiers_.describe(shape, placed);
        if (!least || plan.peak_memory <= least->peak_memory) least = std::move(plan);
      };
      keep_less(in_memory, start.everything);
      keep_less(on_disk, start.least);
    }
    return {*std::move(in_memory), *std::move(on_disk)};
  }

 private:
  std::vector<std::size_t> group_sizes() const {
    if (in_.request.group) return {*in_.request.group};
    return group_sizes_of(in_.profile.micro_batches);
  }

  // One slot is updated; the others keep the disk busy both ways, also while a transfer ends. In any order
  // chunks are updated only between accesses: those of a typical unit should arrive meanwhile.
  std::vector<Tiers::Slots> slots() const {
    const Placement& placement = tiers_.placement();
    const std::size_t slot = UpdatePipeline::slot_bytes(placement.format(), placement.layout(), false);
    const std::size_t one_way = 1 + divide_up(in_.rates.disk_in_flight, std::max<std::size_t>(slot, 1));
    const std::size_t between = in_.profile.any_order ? placement.chunks_of_typical_unit() : 0;
    const std::size_t wanted =
        std::clamp(1 + std::max(2 * one_way, one_way + between), kLeastSlots, kMostStagingSlots);
    if (wanted == kLeastSlots) return {{wanted, 0}};
    return {{wanted, 0}, {kLeastSlots, 0}};
  }

  std::vector<Shape> shapes(std::size_t group) const { return tiers_.shapes(group, levels_, slots()); }

  double computing(std::size_t level) const {
    double seconds = 0;
    for (UnitId unit = 0; unit < times_.size(); ++unit)
      seconds += times_[unit].forward + times_[unit].backward[tiers_.placement().choice_of(unit, level)];
    return static_cast<double>(in_.profile.micro_batches) * seconds;
  }

  // The placements of a group that all shapes share: with everything in memory, and with as little as can be.
  struct Start {
    Start(const Planner& planner, std::size_t groups)
        : everything(planner.placed(Tier::kHost, groups)),
          least(planner.placed(Tier::kDisk, groups)),
          by_gain(planner.tiers_.items(least.units, groups, true)),
          parameters_first(by_gain) {
      std::ranges::stable_partition(parameters_first,
                                    [](const Tiers::Item& item) { return item.part == Part::kParameters; });
    }
    Tiers::Placed everything, least;
    std::vector<Tiers::Item> by_gain, parameters_first;
  };

  Tiers::Placed placed(Tier rest, std::size_t groups) const {
    return tiers_.place_all(rest, groups, std::vector(in_.profile.units.size(), kCpuTier));
  }

  // Puts into memory, while it fits, what saves most traffic for its bytes. All of it takes less of the disk,
  // whose budget may be kept only then.
  std::optional<Plan> fill(const Shape& shape, const Start& start, bool parameters_first) const {
    Plan plan = tiers_.describe(shape, start.everything);
    if (fits(plan, in_.budget)) return plan;
    plan = tiers_.describe(shape, start.least);
    if (plan.peak_memory > in_.budget.memory && !parameters_first) return std::nullopt;
    tiers_.fill(plan, shape, start.least, parameters_first ? start.parameters_first : start.by_gain,
                Tier::kHost, parameters_first);
    return fits(plan, in_.budget) ? std::optional<Plan>(std::move(plan)) : std::nullopt;
  }

  // `last` is the last plan with the same look-ahead, which may make the same step.
  void predict_time(Plan& plan, const Lookahead& lookahead, const std::optional<Plan>& last) const {
    if (last && last->group == plan.group && last->staging_slots == plan.staging_slots &&
        last->units == plan.units) {
      plan.time = last->time;
      plan.step_bytes_received = last->step_bytes_received;
      plan.step_bytes_from_hosts = last->step_bytes_from_hosts;
      plan.step_bytes_from_sections = last->step_bytes_from_sections;
      plan.step_bytes_of_layers = last->step_bytes_of_layers;
      plan.step_bytes_read = last->step_bytes_read;
      plan.step_bytes_read_apart = last->step_bytes_read_apart;
      plan.step_bytes_written = last->step_bytes_written;
      return;
    }
    const std::size_t groups = in_.profile.repeats(plan.group);
    const std::size_t beyond = groups - std::min(groups, kWalkedGroups);
    std::optional<Plan> shorter;
    if (beyond > 0) predict_step(shorter.emplace(plan), lookahead, beyond + kLastGroups);
    predict_step(plan, lookahead, beyond);
    if (beyond > 0) add_groups(plan, *shorter, beyond);
    plan.step_bytes_read_apart = plan.step_bytes_read + tiers_.placement().read_apart(plan.units, plan.group);
  }

  // Of a step of as many groups as are planned, but `beyond`.
  void predict_step(Plan& plan, const Lookahead& lookahead, std::size_t beyond) const {
    const std::vector<Visit> visits = tiers_.placement().visits(
        plan.units, plan.group, times_, in_.profile.micro_batches - beyond * plan.group);
    tiers_.placement().count_bytes(visits, plan);
    const std::size_t window =
        (in_.profile.any_order ? in_.profile.held_units : 1) + lookahead.ahead() - (lookahead.sums ? 1 : 0);
    const std::size_t slots = std::max<std::size_t>(1, plan.staging_slots);
    plan.time = walk(visits, {plan.prefetch, window, slots, plan.sums_beside}, in_.rates);
  }

  // In the middle of a step of many groups each takes as long as the one before: so many more take what the
  // plan has more than the shorter one, which has kLastGroups fewer.
  static void add_groups(Plan& plan, const Plan& shorter, std::size_t more) {
    const double times = static_cast<double>(more) / kLastGroups;
    for (double StepTime::*const each :
         {&StepTime::compute, &StepTime::optimizer, &StepTime::disk, &StepTime::link, &StepTime::transfers,
          &StepTime::step, &StepTime::updates, &StepTime::sums})
      plan.time.*each += times * (plan.time.*each - shorter.time.*each);
    for (std::uint64_t Plan::*const each :
         {&Plan::step_bytes_received, &Plan::step_bytes_from_hosts, &Plan::step_bytes_of_layers,
          &Plan::step_bytes_read, &Plan::step_bytes_written})
      plan.*each += (plan.*each - shorter.*each) / kLastGroups * more;
  }

  const PlanInputs in_;
  const Tiers tiers_;
  std::vector<Placement::Times> times_;  // by unit
  std::vector<std::size_t> levels_;      // of recomputation
};

constexpr std::size_t kMostSlots = 4;  // on a GPU: where there is room, one more waits
// The CPU's slots beside it are as few as there where memory is short. Otherwise some more than chunks that
// it updates at a time come in and go out meanwhile.
constexpr std::size_t kMoreHostSlots = 8;
// Holdings on a GPU may take one part in so many more with larger extents than with the smallest, and so may
// the frames that all holdings elsewhere would take together.
constexpr std::uint64_t kExtentWaste = 16;

// The largest unit has at least so many chunks, so that their copies and updates run side by side; all slots
// may have one part in so many of the memory that is stated.
constexpr std::size_t kLeastChunks = 16;
constexpr std::uint64_t kSlotsShare = 64;

constexpr std::uint64_t kAnyDisk = std::numeric_limits<std::uint64_t>::max();

std::size_t most_host_slots(const MachineRates& rates) {
  return static_cast<std::size_t>(chunks_at_a_time(rates.cores)) + kMoreHostSlots;
}

// Takes the first way to run a step that fits where a GPU computes: as much as fits is on it, first what
// saves most seconds for its bytes, and of the rest as much as fits in host memory. Where the rest fits there
// as a whole the disk is not used, also if it is given; more memory never makes a plan use it. Where all of
// the model fits on the GPU, all of it is there.
//
// The GPU updates the units whose state is there. Of the other units, whose state or whose gradients and
// parameters must be copied, so many are updated by the CPU that a step takes least (share_updates()).
// Updates that a GPU cannot compute at all (Adafactor, Muon) are the CPU's.
class DevicePlanner {
 public:
  explicit DevicePlanner(const PlanInputs& in)
      : in_(in), tiers_(in), updates_{std::vector(in.profile.units.size(), Tier::kDevice), "the GPU"} {
    const bool by_gpu = in_.optimizer.elementwise({}).has_value();
    check_updates(by_gpu);
    keep_shards_with_the_cpu();
    const bool state_is_asked = in_.request.place(Part::kState) == Tier::kDevice;
    chooses_updates_ = by_gpu && !in_.request.updates && !state_is_asked;
    if (chooses_updates_) return;
    const Tier by = in_.request.updates.value_or(by_gpu ? Tier::kDevice : Tier::kHost);
    std::ranges::fill(updates_.updated_on, by);
    updates_.because =
        fmt::format("the {}, {}", by == Tier::kHost ? "CPU" : "GPU",
                    in_.request.updates ? "as asked"
                    : by_gpu            ? "where the optimizer's state is asked to be"
                             : "since " + in_.optimizer.name() + " looks at each parameter as a whole");
  }

  std::optional<Plan> find() {
    std::optional<Plan> plan = attempt(in_.budget.disk);
    if (chooses_updates_ && !tiers_.placement().partitions_any_parameters()) share(plan);
    if (plan) tiers_.placement().predict_on_gpu(in_.rates, in_.request.computing, *plan);
    return plan;
  }

  [[noreturn]] void refuse() const {
    const Plan elsewhere = describe(shapes().back(), Tier::kDisk), there = all_on_gpu();
    if (std::min(elsewhere.device_bytes, there.device_bytes) > in_.budget.device)
      refuse_device_memory(in_.budget, in_.request, elsewhere.device_bytes, there.device_bytes);
    refuse_beside_gpu(
        {in_.profile, in_.request, in_.budget, in_.optimizer.name(), tiers_.placement(),
         LeastOfRanks(least({false, true}, {InMemory::kAll})),
         LeastOfRanks(least({true}, {InMemory::kAllButCpuState, InMemory::kShards, InMemory::kNothing}))},
        attempt(kAnyDisk));
  }

 private:
  // Replaces the plan by one in which the CPU updates, too. Disks are slow, so a plan that uses one is made
  // only where none does without.
  void share(std::optional<Plan>& plan) {
    for (const std::uint64_t disk : {std::uint64_t{0}, in_.budget.disk}) {
      if (share(disk, plan)) return;
      if ((plan && !plan->uses_disk()) || in_.budget.disk == 0) break;
    }
    if (plan) plan->updates_because = "the GPU, since memory is too short for updates by the CPU beside it";
  }
  bool share(std::uint64_t disk, std::optional<Plan>& plan) {
    const double computing = in_.request.computing.value_or(0);
    const auto seconds = [&](Plan of) {
      tiers_.placement().walk_on_gpu(in_.rates, computing, of);
      return of.device_time.step;
    };
    const auto planned = [&](const std::vector<Tier>& updated_on) -> std::optional<double> {
      updates_.updated_on = updated_on;
      const std::optional<Plan> shared = attempt(disk);
      return shared ? std::optional(seconds(*shared)) : std::nullopt;
    };
    const bool fits = plan && (disk > 0 || !plan->uses_disk());
    const std::optional<Plan> alone = plan ? plan : attempt(kAnyDisk);
    if (!alone) return false;
    const std::optional<SharedUpdates> found =
        share_updates(tiers_.placement(), in_.rates, {*alone, fits, seconds(*alone)}, computing, planned);
    updates_ = found.value_or(SharedUpdates{std::vector(alone->units.size(), Tier::kDevice), "the GPU"});
    if (found) plan = attempt(disk);
    return found.has_value();
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

  // Where GPUs do not copy shards of parameters from each other, these are in host memory or on disk, from
  // where all ranks read them.
  void keep_shards_with_the_cpu() {
    const Placement& placement = tiers_.placement();
    if (placement.shards_on_gpus()) return;
    bool has_shards = false;
    for (UnitId unit = 0; unit < updates_.updated_on.size(); ++unit) {
      if (!placement.partitions_parameters(unit)) continue;
      updates_.updated_on[unit] = Tier::kHost;
      has_shards = true;
    }
    if (!has_shards) return;
    if (asks_for_updates_by_gpu(in_.request)) refuse_shards_elsewhere();
    updates_.because = "the CPU where parameters are partitioned, and else the GPU";
  }

  [[noreturn]] void refuse_shards_elsewhere() const {
    const PlanRequest& asked = in_.request;
    const bool asks_for_updates = asked.updates == Tier::kDevice;
    const bool to_disk = asked.place(Part::kParameters) == Tier::kDisk;
    fail(
        ErrorCode::kInvalidArgument,
        "{} on the GPU {} asked for at stage 3, and the CPU updates each rank's shard of the parameters, {}; "
        "{}, {}or ask for stage 1",
        asks_for_updates ? "updates" : "optimizer state", asks_for_updates ? "are" : "is",
        to_disk                   ? "which is asked to be on disk"
        : asked.ranks.gpus_read() ? "which is in host memory, since another rank's cannot be on its GPU"
                                  : "which is in host memory, since the GPUs do not read each other's memory",
        asks_for_updates ? "let the CPU update" : "leave the state in memory or on disk",
        to_disk ? "leave out the place of parameters, " : "");
  }

  std::vector<Shape> shapes() const {
    return tiers_.shapes(1, {0}, {{kMostSlots, most_host_slots(in_.rates)}, {kLeastSlots, kLeastSlots}});
  }

  // The parts not on the GPU that are in host memory: all that may be there; all but state that the CPU alone
  // uses; shards of parameters alone; or none. Parts on disk pass through memory that is taken while any part
  // is there, so that the last parts may fit into memory together where none of them would alone.
  enum class InMemory { kAll, kAllButCpuState, kShards, kNothing };

  // Disks are slow, so any plan that does without is better than one that does not; and a step reads a shard
  // of parameters more often than all else, so that it is there only where no plan has it in memory.
  std::optional<Plan> attempt(std::uint64_t disk) const {
    Budget budget = in_.budget;
    budget.disk = disk;
    if (Plan plan = all_on_gpu(); fits(plan, budget)) return plan;
    for (const bool with_disk : {false, true})
      for (const Shape& shape : shapes())
        if (const std::optional<Plan> on_gpu = fill_gpu(shape, with_disk))
          if (Plan plan = in_memory(*on_gpu, shape, InMemory::kAll); fits(plan, budget)) return plan;
    if (std::optional<Plan> plan = fill_memory(budget, {InMemory::kAllButCpuState, InMemory::kShards}))
      return plan;
    return tiers_.placement().partitions_any_parameters() ? fill_memory(budget, {InMemory::kNothing})
                                                          : std::nullopt;
  }

  // Brings as much into host memory as fits there, where it does not begin with more than fits.
  std::optional<Plan> fill_memory(const Budget& budget, std::initializer_list<InMemory> ways) const {
    for (const Shape& shape : shapes())
      if (const std::optional<Plan> on_gpu = fill_gpu(shape, true))
        for (const InMemory least : ways) {
          Plan plan = in_memory(*on_gpu, shape, least);
          if (plan.peak_memory > budget.memory) continue;
          const auto items = tiers_.items(plan.units, groups(), true);
          tiers_.fill(plan, shape, tiers_.placed(plan.units), items, Tier::kHost);
          if (fits(plan, budget)) return plan;
        }
    return std::nullopt;
  }

  std::size_t groups() const { return in_.profile.micro_batches; }

  // Gradients that do not wait are applied as they come, in the only group of a step.
  Tiers::Placed placed(Tier rest) const { return tiers_.place_all(rest, 1, updates_.updated_on); }

  Plan describe(const Shape& shape, const Tiers::Placed& placed) const {
    Plan plan = tiers_.describe(shape, placed);
    plan.updates_because = updates_.because;
    return plan;
  }
  Plan describe(const Shape& shape, Tier rest) const { return describe(shape, placed(rest)); }

  // The plan with everything on the GPU. It needs neither frames nor slots, so it may fit where no plan does
  // that leaves a little elsewhere.
  Plan all_on_gpu() const { return describe(shapes().front(), Tier::kDevice); }

  // A plan with as much on the GPU as fits there, and the rest on disk, where it may be there. with_disk:
  // whether what saves most is found for a plan that uses the disk.
  std::optional<Plan> fill_gpu(const Shape& shape, bool with_disk) const {
    const Tiers::Placed least = placed(Tier::kDisk);
    Plan plan = describe(shape, least);
    if (plan.device_bytes > in_.budget.device) return std::nullopt;
    tiers_.fill(plan, shape, least, tiers_.items(least.units, groups(), with_disk), Tier::kDevice);
    enlarge_extents(plan, shape);
    return plan;
  }

  // Takes the largest extents with which all that is on the GPU still fits there, and with which neither that
  // nor the frames of all that is elsewhere are much larger.
  void enlarge_extents(Plan& plan, const Shape& shape) const {
    const Placement& placement = tiers_.placement();
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
    const std::uint64_t elsewhere = most(frames_of_all(placement.frame_needs(shape.lookahead), kHugePage));
    const std::uint64_t here = std::min(in_.budget.device, most(plan.device_bytes));
    const Footprint footprint = placement.footprint(plan.units);
    for (std::size_t bytes = kLargestExtentBytes; bytes > kHugePage; bytes /= 2) {
      const FrameNeeds needs = placement.frame_needs(shape.lookahead, bytes);
      if (frames_of_all(needs, bytes) > elsewhere) continue;
      Plan larger = plan;
      larger.extent_bytes = bytes;
      tiers_.count(larger, shape, footprint, Frames(needs, plan.units).most());
      if (larger.device_bytes > here) continue;
      plan = std::move(larger);
      return;
    }
  }

  Plan in_memory(Plan plan, const Shape& shape, InMemory what) const {
    for (UnitPlan& unit : plan.units)
      for (const Part part : {Part::kParameters, Part::kGradient, Part::kState}) {
        const bool is_shard = part == Part::kParameters && unit.shard_on_disk;
        const bool is_cpu_state = part == Part::kState && unit.updated_by_cpu();
        const bool is_wanted = what == InMemory::kAll ||
                               (what == InMemory::kAllButCpuState && !is_cpu_state) ||
                               (what == InMemory::kShards && is_shard);
        if (!is_wanted || in_.request.place(part)) continue;
        if (is_shard)
          unit.shard_on_disk = false;
        else if (unit.tier(part) == Tier::kDisk)
          unit.place(part, Tier::kHost);
      }
    tiers_.count(plan, shape, tiers_.placement().footprint(plan.units), plan.extents);
    return plan;
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
    tiers_.placement().predict_on_gpu(in_.rates, in_.request.computing, *least);
    return *least;
  }

  const PlanInputs in_;
  const Tiers tiers_;
  SharedUpdates updates_;
  bool chooses_updates_ = false;
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

// Updates take long enough with the larger chunk, with which staging may not fit.
std::optional<Plan> find_plan(const PlanInputs& in) {
  const bool on_gpu = in.request.compute == Tier::kDevice;
  const auto find = [&](const PlanRequest& request) {
    return on_gpu ? DevicePlanner(in.with(request)).find() : Planner(in.with(request)).find();
  };
  PlanRequest at = in.request;
  if (at.chunk_elements) return find(at);
  const std::size_t chunk = Placement(in.profile, in.optimizer, at).chunk_for(in.rates);
  const std::size_t least = on_gpu ? chunk : kChunkGrain;
  at.chunk_elements = on_gpu ? larger_chunk(in, at, chunk) : chunk;
  if (*at.chunk_elements > least)
    if (std::optional<Plan> plan = find(at); plan && !(on_gpu && plan->uses_disk())) return plan;
  at.chunk_elements = least;
  return find(at);
}

std::vector<SectionSeconds> seconds_of_units(const Profile& profile, const optim::Optimizer& optimizer,
                                             const PlanRequest& request, const MachineRates& rates) {
  const std::size_t level = recompute_levels(profile, request.recompute).front();
  std::vector<SectionSeconds> seconds;
  for (const Placement::Times& times : Placement(profile, optimizer, request).times(rates))
    seconds.push_back(
        {times.forward, times.backward[std::min(level, times.backward.size() - 1)], 0, times.weights});
  // A unit that is accessed once, as the head is, is computed forward where it is computed backward.
  for (UnitId unit = 0; unit < seconds.size(); ++unit)
    if (std::ranges::count(profile.schedule, unit, &Access::unit) == 1)
      seconds[unit].backward += std::exchange(seconds[unit].forward, 0);
  return seconds;
}

void state_computing(const Profile& profile, const optim::Optimizer& optimizer, const MachineRates& rates,
                     double computing, Plan& plan) {
  PlanRequest request;
  request.clip = plan.clip;
  request.ranks = plan.ranks;
  request.stages = plan.stages();
  request.shards = plan.shard_place();
  request.sums_each_backward = plan.sums_each_backward;
  if (plan.sums_in_backward)
    request.stage = plan.one_stage();
  else
    request.whole_gradients = true;
  // A small model's chunks end with its largest unit, which is no size that can be asked for.
  request.chunk_elements = round_up(plan.chunk_elements, kChunkGrain);
  request.compute = Tier::kDevice;
  Placement(profile, optimizer, request).walk_on_gpu(rates, computing, plan);
}

void refuse_plan(const PlanInputs& in) {
  if (in.request.compute == Tier::kDevice) {
    PlanRequest at = in.request;
    if (!at.chunk_elements) at.chunk_elements = Placement(in.profile, in.optimizer, at).chunk_for(in.rates);
    DevicePlanner(in.with(at)).refuse();
  }
  const std::vector<int> ranks = largest_ranks(in.profile, in.optimizer, in.request);
  std::optional<LeastOfRanks> in_memory, on_disk;
  // One micro-batch at a time takes least for activations. With all at a time gradients are final at once,
  // and ranks need keep no more of them than their shards.
  for (const std::size_t group :
       {in.request.group.value_or(1), in.request.group.value_or(in.profile.micro_batches)}) {
    PlanRequest at = in.request;
    at.group = group;
    const Planner::Least own = Planner(in.with(at)).least();
    LeastOfRanks all_in_memory(own.in_memory), all_on_disk(own.on_disk);
    for (const int rank : ranks) {
      if (rank == in.request.ranks.rank) continue;
      at.ranks.rank = rank;
      const Planner::Least of_rank = Planner(in.with(at)).least();
      all_in_memory.count(of_rank.in_memory);
      all_on_disk.count(of_rank.on_disk);
    }
    if (!in_memory || all_in_memory.memory < in_memory->memory) in_memory = all_in_memory;
    if (!on_disk || all_on_disk.is_less(*on_disk, in.budget)) on_disk = all_on_disk;
  }
  const Placement placement(in.profile, in.optimizer, in.request);
  refuse({in.profile, in.request, in.budget, in.optimizer.name(), placement, *in_memory, *on_disk});
}

}  // namespace sluice::engine
