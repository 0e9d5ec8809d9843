#include "engine/plan/plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/memory/pager.h"
#include "engine/memory/stored_shards.h"
#include "engine/planner/largest_ranks.h"
#include "engine/planner/placement.h"
#include "engine/planner/planner.h"
#include "engine/planner/shortage.h"
#include "engine/planner/stages.h"
#include "engine/updates/update_pipeline.h"

namespace sluice::engine {
namespace {

using allocator::Purpose;
using allocator::Tier;

constexpr std::size_t kLeastStagingSlots = 3, kMostStagingSlots = 32, kMostServingPieces = 32;
constexpr std::size_t kWalkedGroups = 64, kLastGroups = 16;  // of a step of more, for its time
constexpr std::size_t kUnitsForLonger = 12;  // in models of fewer, frames reach 2 accesses ahead
constexpr double kRounding = 1e-9;           // relative error of a sum in another order

// One way to run a step, apart from what is resident.
struct Shape {
  std::size_t group = 1;
  std::size_t level = 0;
  Lookahead lookahead;
  std::size_t ahead = 0;  // the index of `lookahead` in lookaheads()
  std::size_t slots = kLeastStagingSlots;
  bool fewest() const { return slots == kLeastStagingSlots; }
};

class Planner {
 public:
  explicit Planner(const PlanInputs& in)
      : in_(in),
        placement_(in.profile, in.optimizer, in.request),
        needs_scratch_(placement_.needs_scratch()),
        times_(placement_.times(in.rates)),
        levels_(recompute_levels(in.profile, in.request.recompute)),
        element_bytes_(placement_.element_bytes()) {
    check_request();
    for (const bool streams : {false, true})
      slot_bytes_[streams ? 1 : 0] =
          UpdatePipeline::slot_bytes(placement_.format(), placement_.layout(), streams);
    for (const Lookahead& lookahead : lookaheads()) needs_.push_back(placement_.frame_needs(lookahead));
  }

  std::optional<Plan> find() const {
    std::optional<Plan> best;
    std::vector<std::optional<Plan>> last(needs_.size());  // by look-ahead
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
    const Shape shape{*in_.request.group, levels_.back(), lookaheads().back(), needs_.size() - 1,
                      kLeastStagingSlots};
    const std::size_t groups = in_.profile.repeats(shape.group);
    return {describe(shape, {*this, groups, true}), describe(shape, {*this, groups, false})};
  }

 private:
  void check_request() const {
    if (in_.request.group && (*in_.request.group == 0 || *in_.request.group > in_.profile.micro_batches))
      fail(ErrorCode::kInvalidArgument, "a group of {} micro-batches is asked for, and a step has {}",
           *in_.request.group, in_.profile.micro_batches);
  }

  std::vector<std::size_t> group_sizes() const {
    if (in_.request.group) return {*in_.request.group};
    return group_sizes_of(in_.profile.micro_batches);
  }

  std::vector<Lookahead> lookaheads() const {
    std::vector<Lookahead> all = {{2, true}, {1, true}, {1, false}};
    if (in_.profile.units.size() >= kUnitsForLonger) all.insert(all.begin(), {4, true});
    if (in_.request.prefetch) all = {{*in_.request.prefetch, true}, {*in_.request.prefetch, false}};
    if (placement_.sums_go_on()) {
      const Lookahead least = all.back();
      for (Lookahead& each : all) each.sums = true;
      if (!in_.profile.any_order) all.push_back(least);
    }
    return all;
  }

  // One slot is updated; the others keep the disk busy both ways, also while a transfer ends. In any order
  // chunks are updated only between accesses: those of a typical unit should arrive meanwhile.
  std::vector<std::size_t> slot_counts() const {
    const std::size_t one_way =
        1 + divide_up(in_.rates.disk_in_flight, std::max<std::size_t>(slot_bytes_[0], 1));
    const std::size_t between = in_.profile.any_order ? placement_.chunks_of_typical_unit() : 0;
    const std::size_t wanted =
        std::clamp(1 + std::max(2 * one_way, one_way + between), kLeastStagingSlots, kMostStagingSlots);
    if (wanted == kLeastStagingSlots) return {wanted};
    return {wanted, kLeastStagingSlots};
  }

  std::vector<Shape> shapes(std::size_t group) const {
    std::vector<Shape> result;
    const std::vector<Lookahead> all = lookaheads();
    for (const std::size_t level : levels_)
      for (std::size_t ahead = 0; ahead < all.size(); ++ahead)
        for (const std::size_t slots : slot_counts())
          result.push_back({group, level, all[ahead], ahead, slots});
    return result;
  }

  double computing(std::size_t level) const {
    double seconds = 0;
    for (UnitId unit = 0; unit < times_.size(); ++unit)
      seconds += times_[unit].forward + times_[unit].backward[choice_of(unit, level)];
    return static_cast<double>(in_.profile.micro_batches) * seconds;
  }

  std::size_t choice_of(UnitId unit, std::size_t level) const {
    return std::min(level, in_.profile.unit_profiles[unit].choices.size() - 1);
  }

  std::vector<UnitPlan> units_at(std::size_t groups, bool resident) const {
    std::vector<UnitPlan> units(in_.profile.units.size());
    for (UnitId unit = 0; unit < units.size(); ++unit) {
      units[unit].stage = placement_.stage(unit);
      const bool small = is_packed(placement_.parameter_bytes(unit));
      const auto place = [&](Part part, std::size_t bytes) {
        const Tier chosen = resident || small ? kCpuTier : Tier::kDisk;
        units[unit].place(part, bytes == 0 ? kCpuTier : in_.request.place(part).value_or(chosen));
      };
      place(Part::kParameters, placement_.parameter_bytes(unit));
      if (placement_.partitions_parameters(unit)) {
        units[unit].shard_on_disk =
            placement_.may_store_shard(unit) && units[unit].tier(Part::kParameters) == Tier::kDisk;
        units[unit].place(Part::kParameters, Tier::kRanks);
      }
      place(Part::kGradient, placement_.gradient_bytes(unit));
      place(Part::kState, placement_.state_bytes(unit));
      units[unit].gradient_stored =
          placement_.gradient_bytes(unit) == 0 || placement_.stores_gradient(unit, groups);
      units[unit].gradient_in_shards = placement_.partitions_gradient(unit, groups);
      if (units[unit].gradient_in_shards) {
        units[unit].gradient_stored = !units[unit].resident(Part::kGradient);
        if (!units[unit].gradient_stored) units[unit].place(Part::kGradient, Tier::kRanks);
      } else if (!units[unit].gradient_stored) {
        units[unit].place(Part::kGradient, Tier::kDisk);
      }
    }
    return units;
  }

  struct Item {
    UnitId unit;
    Part part;
    double gain;  // bytes of traffic saved for each byte of memory
  };

  // A placement of all units and what it takes, before recomputation and slots are chosen.
  struct Placed {
    Placed(const Planner& planner, std::size_t groups, bool resident)
        : units(planner.units_at(groups, resident)), footprint(planner.placement_.footprint(units)) {
      for (const FrameNeeds& needs : planner.needs_) frames.emplace_back(needs, units);
    }
    std::vector<UnitPlan> units;
    Footprint footprint;
    std::vector<Frames> frames;  // by look-ahead
  };

  struct Start {
    Start(const Planner& planner, std::size_t groups)
        : everything(planner, groups, true),
          least(planner, groups, false),
          by_gain(planner.items(groups, least.units)),
          parameters_first(by_gain) {
      std::ranges::stable_partition(parameters_first,
                                    [](const Item& item) { return item.part == Part::kParameters; });
    }
    Placed everything, least;
    std::vector<Item> by_gain, parameters_first;
  };

  std::vector<Item> items(std::size_t groups, const std::vector<UnitPlan>& placed) const {
    std::vector<Item> result;
    const auto offer = [&](UnitId unit, Part part, std::uint64_t saved, std::size_t held) {
      const bool in_shards = placed[unit].tier(part) == Tier::kRanks;
      const bool stored = part == Part::kParameters && placed[unit].shard_on_disk;
      const bool fixed = (in_shards && !stored) || in_.request.place(part);
      if (placed[unit].resident(part) || fixed || saved == 0) return;
      result.push_back({unit, part, static_cast<double>(saved) / static_cast<double>(held)});
    };
    for (UnitId unit = 0; unit < placed.size(); ++unit) {
      if (placed[unit].shard_on_disk)
        offer(unit, Part::kParameters,
              placement_.fetched_of_shard(unit, groups) + placement_.shard_traffic(unit).total(),
              placement_.shard_bytes(unit));
      else
        offer(unit, Part::kParameters, placement_.parameter_traffic(unit, groups).total(),
              placement_.parameter_bytes(unit));
      if (placed[unit].gradient_stored)
        offer(unit, Part::kGradient, placement_.gradient_traffic(unit, groups).total(),
              placement_.kept_gradient_bytes(unit, placed[unit]));
      offer(unit, Part::kState, placement_.state_traffic(unit).total(), placement_.state_bytes(unit));
    }
    std::ranges::stable_sort(result, std::greater<>(), &Item::gain);
    return result;
  }

  // Puts into memory, while it fits, what saves most traffic for its bytes. All of it takes less of the disk,
  // whose budget may be kept only then.
  std::optional<Plan> fill(const Shape& shape, const Start& start, bool parameters_first) const {
    Plan plan = describe(shape, start.everything);
    if (fits(plan)) return plan;
    plan = describe(shape, start.least);
    if (plan.peak_memory > in_.budget.memory && !parameters_first) return std::nullopt;
    Footprint footprint = start.least.footprint;
    Frames frames = start.least.frames[shape.ahead];
    for (const Item& item : parameters_first ? start.parameters_first : start.by_gain) {
      UnitPlan larger = plan.units[item.unit];
      Footprint then = footprint;
      placement_.to_memory(item.unit, item.part, larger, then);
      const bool frees_frames = item.part != Part::kState && larger.resident(item.part);
      const auto fits_in = [&](std::size_t extents) {
        return sum(host_bytes(plan, shape, then, extents)) <= in_.budget.memory;
      };
      // With parameters first, it may fit only when the last of them free their frames.
      if (!(parameters_first && item.part == Part::kParameters && frees_frames) && !fits_in(frames.bound()) &&
          !fits_in(frees_frames ? frames.most_without(item.unit, item.part) : frames.most()))
        continue;
      if (frees_frames) frames.remove(item.unit, item.part);
      plan.units[item.unit] = larger;
      footprint = then;
    }
    predict_memory(plan, shape, footprint, frames.most());
    return fits(plan) ? std::optional<Plan>(std::move(plan)) : std::nullopt;
  }

  Plan describe(const Shape& shape, const Placed& placed) const {
    Plan plan;
    plan.ranks = in_.request.ranks;
    plan.knows_link = in_.rates.link.has_value();
    plan.clip = in_.request.clip;
    plan.reproducible = in_.request.reproducible;
    plan.sums_bytes = placement_.sums_bytes();
    plan.group = shape.group;
    plan.prefetch = shape.lookahead.prefetch;
    plan.sums_beside = shape.lookahead.sums;
    // Extents of this size need few enough mappings for a pool of any size.
    plan.extent_bytes = kHugePage;
    plan.chunk_elements = placement_.format().shards().chunk_elements();
    plan.state_bytes_per_parameter = element_bytes_;
    plan.units = placed.units;
    for (UnitId unit = 0; unit < plan.units.size(); ++unit)
      plan.units[unit].choice = choice_of(unit, shape.level);
    plan.activation_bytes = placement_.activation_bytes(plan.units, shape.group);
    plan.workspace_bytes = placement_.workspace_bytes(plan.units);
    predict_memory(plan, shape, placed.footprint, placed.frames[shape.ahead].bound());
    return plan;
  }

  std::size_t slots_of(const Shape& shape, const Footprint& footprint) const {
    return footprint.streamed > 0 ? shape.slots : needs_scratch_ ? 1 : 0;
  }

  // As many as keep the disk busy, and as many that are sent meanwhile.
  std::size_t pieces_of(const Shape& shape, const Footprint& footprint) const {
    if (footprint.shards_on_disk == 0) return 0;
    if (shape.fewest()) return StoredShards::kFewestPieces;
    return std::clamp(2 * divide_up(in_.rates.disk_in_flight, StoredShards::kPiece),
                      StoredShards::kFewestPieces, kMostServingPieces);
  }

  using Bytes = std::array<std::uint64_t, allocator::kPurposes>;
  Bytes host_bytes(const Plan& plan, const Shape& shape, const Footprint& footprint,
                   std::size_t extents) const {
    Bytes host = {};
    host[index(Purpose::kParameter)] = footprint.memory(Part::kParameters) + extents * plan.extent_bytes +
                                       round_up(footprint.shards[index(Part::kParameters)], kHugePage);
    host[index(Purpose::kGradient)] = footprint.memory(Part::kGradient) +
                                      round_up(footprint.shards[index(Part::kGradient)], kHugePage) +
                                      round_up(plan.sums_bytes, kHugePage);
    host[index(Purpose::kOptimizerState)] =
        footprint.memory(Part::kState) + round_up(placement_.whole_bytes(), kHugePage);
    host[index(Purpose::kActivation)] = round_up(plan.activation_bytes, kHugePage);
    host[index(Purpose::kWorkspace)] = round_up(plan.workspace_bytes, kHugePage) + in_.profile.hidden_bytes +
                                       round_up(placement_.rounds().bytes, kHugePage);
    const std::size_t slot = slot_bytes_[footprint.shards_on_disk > 0 ? 1 : 0];
    host[index(Purpose::kStaging)] = round_up(slots_of(shape, footprint) * slot, kHugePage) +
                                     round_up(pieces_of(shape, footprint) * StoredShards::kPiece, kHugePage) +
                                     placement_.relay_bytes(shape.fewest());
    host[index(Purpose::kBase)] = in_.budget.base + footprint.metadata;
    return host;
  }

  static std::uint64_t sum(const auto& bytes) {
    return std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
  }

  void predict_memory(Plan& plan, const Shape& shape, const Footprint& footprint, std::size_t extents) const {
    plan.extents = extents;
    plan.staging_slots = slots_of(shape, footprint);
    plan.serving_pieces = pieces_of(shape, footprint);
    plan.relay_pieces = placement_.relay_pieces(shape.fewest());
    plan.relay_piece_bytes = placement_.relay_piece_bytes();
    plan.bytes[index(Tier::kHost)] = host_bytes(plan, shape, footprint, extents);
    Bytes& disk = plan.bytes[index(Tier::kDisk)];
    disk[index(Purpose::kParameter)] = footprint.disk[index(Part::kParameters)];
    disk[index(Purpose::kGradient)] = footprint.disk[index(Part::kGradient)];
    disk[index(Purpose::kOptimizerState)] = footprint.disk[index(Part::kState)];
    plan.peak_memory = sum(plan.bytes[index(Tier::kHost)]);
    plan.disk_bytes = sum(disk);
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
    plan.step_bytes_read_apart = plan.step_bytes_read + placement_.read_apart(plan.units, plan.group);
  }

  // Of a step of as many groups as are planned, but `beyond`.
  void predict_step(Plan& plan, const Lookahead& lookahead, std::size_t beyond) const {
    const std::vector<Visit> visits =
        placement_.visits(plan.units, plan.group, times_, in_.profile.micro_batches - beyond * plan.group);
    placement_.count_bytes(visits, plan);
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
    for (std::uint64_t Plan::*const each : {&Plan::step_bytes_received, &Plan::step_bytes_from_hosts,
                                            &Plan::step_bytes_read, &Plan::step_bytes_written})
      plan.*each += (plan.*each - shorter.*each) / kLastGroups * more;
  }

  bool fits(const Plan& plan) const {
    return plan.peak_memory <= in_.budget.memory && plan.disk_bytes <= in_.budget.disk;
  }

  const PlanInputs in_;
  Placement placement_;
  bool needs_scratch_;
  std::vector<Placement::Times> times_;  // by unit
  std::vector<std::size_t> levels_;      // of recomputation
  double element_bytes_;
  std::array<std::size_t, 2> slot_bytes_ = {};  // of a staging slot without parameters, and with them
  std::vector<FrameNeeds> needs_;               // by look-ahead
};

}  // namespace

std::optional<Plan> find_plan(const PlanInputs& in) {
  const std::size_t chunk = Placement(in.profile, in.optimizer, in.request).chunk_for(in.rates);
  if (!in.request.chunk_elements && chunk > kChunkGrain) {
    PlanRequest larger = in.request;
    larger.chunk_elements = chunk;
    if (std::optional<Plan> plan = Planner(in.with(larger)).find()) return plan;
  }
  return Planner(in).find();
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

void refuse_plan(const PlanInputs& in) {
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
