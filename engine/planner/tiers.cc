#include "engine/planner/tiers.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "core/bytes.h"
#include "core/interrupt.h"
#include "engine/gradients/device_gradients.h"
#include "engine/gradients/gradient_parts.h"
#include "engine/memory/device_disk.h"
#include "engine/memory/device_ranks.h"
#include "engine/memory/device_shards.h"
#include "engine/memory/host_staging.h"
#include "engine/memory/pager.h"
#include "engine/memory/stored_shards.h"
#include "engine/updates/update_pipeline.h"

namespace sluice::engine {
namespace {

using allocator::Purpose;
using allocator::Tier;

constexpr Part kAllParts[] = {Part::kParameters, Part::kGradient, Part::kState};
constexpr std::size_t kMostServingPieces = 32;
constexpr std::size_t kUnitsForLonger = 12;  // in models of fewer, frames reach 2 accesses ahead

constexpr std::size_t purpose_of(Part part) {
  constexpr Purpose kPurposeOf[] = {Purpose::kParameter, Purpose::kGradient, Purpose::kOptimizerState};
  return index(kPurposeOf[index(part)]);
}

std::uint64_t sum(const auto& bytes) { return std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0}); }

std::vector<Lookahead> lookaheads_of(const PlanInputs& in, const Placement& placement) {
  std::vector<Lookahead> all = {{2, true}, {1, true}, {1, false}};
  if (in.request.compute == kCpuTier && in.profile.units.size() >= kUnitsForLonger)
    all.insert(all.begin(), {4, true});
  if (in.request.prefetch) all = {{*in.request.prefetch, true}, {*in.request.prefetch, false}};
  if (!placement.sums_go_on()) return all;
  const Lookahead least = all.back();
  for (Lookahead& each : all) each.sums = true;
  if (!in.profile.any_order) all.push_back(least);
  return all;
}

// Of items that save as much, but for what padding takes, the first units come first: backward ends with
// them, and the next step begins with them, so that nothing else goes on beside their updates on a GPU.
void begin_with_first_units(std::vector<Tiers::Item>& items) {
  for (auto begin = items.begin(); begin != items.end();) {
    const auto is_less = [least = kAlike * begin->gain](const Tiers::Item& item) {
      return item.gain < least;
    };
    const auto end = std::find_if(begin, items.end(), is_less);
    std::stable_sort(begin, end, [](const auto& a, const auto& b) { return a.unit < b.unit; });
    begin = end;
  }
}

}  // namespace

Tiers::Tiers(const PlanInputs& in)
    : in_(in),
      placement_(in.profile, in.optimizer, in.request),
      lookaheads_(lookaheads_of(in, placement_)),
      needs_scratch_(!on_gpu() && placement_.needs_scratch()),
      element_bytes_(placement_.element_bytes()),
      fixed_(fixed_bytes()) {
  for (const Lookahead& lookahead : lookaheads_) needs_.push_back(placement_.frame_needs(lookahead));
  for (const bool more : {false, true}) {
    slot_bytes_[more ? 1 : 0] = UpdatePipeline::slot_bytes(placement_.format(), placement_.layout(), more);
    if (on_gpu())
      host_slot_bytes_[more ? 1 : 0] =
          UpdatePipeline::cpu_slot_bytes(placement_.format(), placement_.layout(), more);
  }
}

Tiers::Bytes Tiers::fixed_bytes() const {
  Bytes all = {};
  const auto add = [&](Tier tier, Purpose purpose, std::uint64_t bytes) {
    all[index(tier)][index(purpose)] += round_up(bytes, kHugePage);
  };
  add(Tier::kHost, Purpose::kGradient, placement_.sums_bytes());
  add(Tier::kHost, Purpose::kOptimizerState, placement_.whole_bytes());
  add(Tier::kHost, Purpose::kWorkspace, placement_.rounds().bytes);
  all[index(Tier::kHost)][index(Purpose::kWorkspace)] += in_.profile.hidden_bytes;
  all[index(Tier::kHost)][index(Purpose::kBase)] = in_.budget.base;
  if (placement_.sums_each_backward())
    add(in_.request.compute, Purpose::kStaging, GradientParts::staging_bytes());
  if (!on_gpu()) return all;
  const Layout& layout = placement_.layout();
  add(Tier::kDevice, Purpose::kWorkspace, DeviceGradients::device_bytes(layout));
  add(Tier::kHost, Purpose::kWorkspace, DeviceGradients::host_bytes(layout));
  if (placement_.sums_each_backward()) {
    std::vector<ElementRange> own;
    for (UnitId unit = 0; unit < layout.units().size(); ++unit)
      own.push_back(placement_.format().shards().here(unit));
    add(Tier::kDevice, Purpose::kWorkspace, DeviceGradients::device_bytes(layout, own));
    add(Tier::kHost, Purpose::kWorkspace, DeviceGradients::host_bytes(layout, own));
  }
  add(Tier::kHost, Purpose::kStaging, HostStaging::bytes(placement_.format()));
  add(Tier::kDevice, Purpose::kStaging, placement_.passing().places * placement_.passing().bytes);
  if (placement_.partitions_any_parameters() && !placement_.copies_shards())
    add(Tier::kHost, Purpose::kStaging, DeviceShards::bytes());
  const auto add_ranks = [&](DeviceRanks::Of of) {
    all[index(Tier::kDevice)][index(Purpose::kStaging)] +=
        DeviceRanks::device_bytes(layout, of, placement_.meeting());
    all[index(Tier::kHost)][index(Purpose::kStaging)] += DeviceRanks::bytes(layout, of, placement_.meeting());
  };
  if (in_.request.ranks.size > 1) add_ranks(DeviceRanks::Of::kGradients);
  if (placement_.gathers_any()) add_ranks(DeviceRanks::Of::kParameters);
  all[index(Tier::kDevice)][index(Purpose::kBase)] = in_.budget.device_base;
  return all;
}

Tiers::Placed Tiers::place_all(Tier rest, std::size_t groups, const std::vector<Tier>& updated_on) const {
  std::vector<UnitPlan> units;
  for (UnitId unit = 0; unit < in_.profile.units.size(); ++unit)
    units.push_back(place(unit, rest, groups, updated_on[unit]));
  return placed(std::move(units));
}

Tiers::Placed Tiers::placed(std::vector<UnitPlan> units) const {
  Placed placed{std::move(units), {}, {}};
  placed.footprint = placement_.footprint(placed.units);
  for (const FrameNeeds& needs : needs_) placed.frames.emplace_back(needs, placed.units);
  return placed;
}

UnitPlan Tiers::place(UnitId unit, Tier rest, std::size_t groups, Tier updated_on) const {
  UnitPlan plan;
  plan.stage = placement_.stage(unit);
  plan.compute = in_.request.compute;
  plan.updated_on = updated_on;
  const bool is_small = is_packed(placement_.parameter_bytes(unit));
  for (const Part part : kAllParts) {
    const Tier nearest = part == Part::kState ? updated_on : plan.compute;
    const bool is_near = rest == plan.compute || (is_small && nearest == plan.compute);
    const Tier wanted = in_.request.place(part).value_or(is_near ? nearest : rest);
    // State that the CPU updates beside a GPU cannot be there.
    const bool can_be = wanted != plan.compute || nearest == plan.compute;
    plan.place(part, can_be && placement_.part_bytes(unit, part, plan) > 0 ? wanted : nearest);
  }
  if (placement_.partitions_parameters(unit)) {
    plan.shard_on_disk = placement_.may_store_shard(unit) && plan.tier(Part::kParameters) == Tier::kDisk;
    plan.place(Part::kParameters, Tier::kRanks);
  }
  const Tier away = on_gpu() ? Tier::kHost : Tier::kDisk;  // where no gradient is resident
  plan.gradient_stored = placement_.gradient_bytes(unit) == 0 || placement_.stores_gradient(unit, groups);
  plan.gradient_in_shards =
      placement_.partitions_gradient(unit, groups) || placement_.keeps_gradient_shard(unit);
  if (plan.gradient_in_shards) {
    const bool is_near = plan.resident(Part::kGradient) && updated_on == plan.compute;
    plan.gradient_stored = !in_.profile.any_order && !is_near;
    plan.place(Part::kGradient, is_near ? Tier::kRanks : away);
  } else if (!plan.gradient_stored) {
    plan.place(Part::kGradient, away);
  }
  return plan;
}

bool Tiers::is_fixed(const UnitPlan& plan, Part part) const {
  if (in_.request.place(part)) return true;
  if (part == Part::kGradient && !plan.gradient_stored && !plan.gradient_in_shards) return true;
  return plan.tier(part) == Tier::kRanks && !(part == Part::kParameters && plan.shard_on_disk);
}

std::vector<Tiers::Item> Tiers::items(const std::vector<UnitPlan>& units, std::size_t groups,
                                      bool with_disk) const {
  std::vector<Item> result;
  for (UnitId unit = 0; unit < units.size(); ++unit)
    for (const Part part : kAllParts) {
      const UnitPlan& plan = units[unit];
      if (plan.resident(part) || is_fixed(plan, part)) continue;
      const bool whole = on_gpu() && with_disk && plan.stage > 0;
      const Placement::Traffic saved = placement_.traffic(unit, part, plan, groups, whole);
      auto gain = static_cast<double>(saved.total());
      if (on_gpu()) gain = copy_seconds(saved.read, saved.written, in_.rates.gpu);
      if (on_gpu() && with_disk) gain += disk_seconds(saved.read, saved.written, in_.rates);
      if (gain > 0)
        result.push_back({unit, part, gain / static_cast<double>(placement_.part_bytes(unit, part, plan))});
    }
  std::ranges::stable_sort(result, std::greater<>(), &Item::gain);
  if (on_gpu()) begin_with_first_units(result);
  return result;
}

std::vector<Shape> Tiers::shapes(std::size_t group, const std::vector<std::size_t>& levels,
                                 const std::vector<Slots>& slots) const {
  std::vector<Shape> result;
  for (const std::size_t level : levels)
    for (std::size_t ahead = 0; ahead < lookaheads_.size(); ++ahead)
      for (const auto& [own, of_host] : slots)
        result.push_back({group, level, lookaheads_[ahead], ahead, own, of_host});
  return result;
}

Plan Tiers::describe(const Shape& shape, const Placed& placed) const {
  look_for_interrupt();  // each way to run a step is described
  Plan plan;
  plan.ranks = in_.request.ranks;
  plan.knows_link = in_.rates.link.has_value();
  plan.clip = in_.request.clip;
  plan.reproducible = in_.request.reproducible;
  plan.sums_bytes = placement_.sums_bytes();
  plan.sums_in_backward = placement_.sums_in_backward();
  plan.sums_each_backward = placement_.sums_each_backward();
  plan.group = shape.group;
  plan.prefetch = shape.lookahead.prefetch;
  plan.sums_beside = shape.lookahead.sums;
  // Extents of this size need few enough mappings for a pool of any size in the host's memory.
  plan.extent_bytes = kHugePage;
  plan.chunk_elements = placement_.format().shards().chunk_elements();
  plan.state_bytes_per_parameter = element_bytes_;
  plan.units = placed.units;
  for (UnitId unit = 0; unit < plan.units.size(); ++unit)
    plan.units[unit].choice = placement_.choice_of(unit, shape.level);
  plan.activation_bytes = placement_.activation_bytes(plan.units, shape.group);
  plan.workspace_bytes = placement_.workspace_bytes(plan.units);
  count(plan, shape, placed.footprint, placed.frames[shape.ahead].bound());
  return plan;
}

void Tiers::fill(Plan& plan, const Shape& shape, const Placed& placed, const std::vector<Item>& items,
                 Tier to, bool parameters_first) const {
  const std::uint64_t budget = to == Tier::kDevice ? in_.budget.device : in_.budget.memory;
  const bool to_gpu = to == Tier::kDevice;
  Footprint footprint = placed.footprint;
  Frames frames = placed.frames[shape.ahead];
  for (const Item& item : items) {
    UnitPlan nearer = plan.units[item.unit];
    // The CPU has state and shards of parameters in host memory, and gradients are copied there in any case.
    if (nearer.tier(item.part) == to ||
        (to_gpu && nearer.updated_by_cpu() && (item.part != Part::kParameters || nearer.shard_on_disk)))
      continue;
    Footprint then = footprint;
    placement_.to_memory(item.unit, item.part, to, nearer, then);
    const bool frees_frames = item.part != Part::kState && nearer.resident(item.part);
    const auto fits_in = [&](std::size_t extents) {
      return sum(bytes(plan, shape, then, extents)[index(to)]) <= budget;
    };
    if (!(parameters_first && item.part == Part::kParameters && frees_frames) && !fits_in(frames.bound()) &&
        !fits_in(frees_frames ? frames.most_without(item.unit, item.part) : frames.most()))
      continue;
    if (frees_frames) frames.remove(item.unit, item.part);
    plan.units[item.unit] = nearer;
    footprint = then;
  }
  count(plan, shape, footprint, to == plan.compute() ? frames.most() : plan.extents);
  add_pieces(plan);
}

std::size_t Tiers::slots(const Shape& shape, const Footprint& footprint) const {
  return footprint.streamed > 0 ? shape.slots : needs_scratch_ ? 1 : 0;
}

// As many as keep the disk busy, and as many that are sent meanwhile.
std::size_t Tiers::most_pieces() const {
  return std::clamp(2 * divide_up(in_.rates.disk_in_flight, StoredShards::kPiece),
                    StoredShards::kFewestPieces, kMostServingPieces);
}

std::size_t Tiers::pieces(const Shape& shape, const Footprint& footprint) const {
  if (footprint.shards_on_disk == 0) return 0;
  return shape.fewest() ? StoredShards::kFewestPieces : most_pieces();
}

// With few pieces in flight a shard waits for the disk's latency, so they get the memory that is left, unless
// the client of an engine in any order uses that.
void Tiers::add_pieces(Plan& plan) const {
  if (in_.profile.any_order) return;
  while (plan.serving_pieces > 0 && plan.serving_pieces < most_pieces() &&
         plan.peak_memory + kHugePage <= in_.budget.memory) {
    plan.serving_pieces += kHugePage / StoredShards::kPiece;
    plan.bytes[index(Tier::kHost)][index(Purpose::kStaging)] += kHugePage;
    plan.peak_memory += kHugePage;
  }
}

Tiers::Bytes Tiers::bytes(const Plan& plan, const Shape& shape, const Footprint& footprint,
                          std::size_t extents) const {
  Bytes all = fixed_;
  auto &near = all[index(in_.request.compute)], &host = all[index(Tier::kHost)];
  const auto add = [](auto& to, Purpose purpose, std::uint64_t bytes) {
    to[index(purpose)] += round_up(bytes, kHugePage);
  };
  for (const Part part : kAllParts) {
    near[purpose_of(part)] += footprint.memory(part);
    host[purpose_of(part)] += round_up(footprint.host[index(part)], kHugePage);
    all[index(Tier::kDisk)][purpose_of(part)] = footprint.disk[index(part)];
  }
  near[index(Purpose::kParameter)] += extents * plan.extent_bytes;
  add(placement_.shards_on_gpus() ? near : host, Purpose::kParameter,
      footprint.shards[index(Part::kParameters)]);
  add(near, Purpose::kGradient, footprint.shards[index(Part::kGradient)]);
  add(host, Purpose::kOptimizerState, footprint.cpu_state);
  add(near, Purpose::kActivation, plan.activation_bytes);
  add(near, Purpose::kWorkspace, plan.workspace_bytes);
  add(near, Purpose::kStaging,
      slots(shape, footprint) * slot_bytes_[footprint.shards_on_disk > 0 && !on_gpu() ? 1 : 0]);
  add(host, Purpose::kStaging,
      host_slots(shape, footprint) * host_slot_bytes_[footprint.cpu_disk > 0 ? 1 : 0]);
  add(host, Purpose::kStaging, pieces(shape, footprint) * StoredShards::kPiece);
  add(host, Purpose::kStaging, placement_.relay_bytes(shape.fewest()));
  if (on_gpu() && sum(footprint.disk) > footprint.cpu_disk)
    add(host, Purpose::kStaging,
        DeviceDisk::bytes(DeviceDisk::piece_bytes(placement_.layout(), placement_.format())));
  host[index(Purpose::kBase)] += footprint.metadata;
  return all;
}

void Tiers::count(Plan& plan, const Shape& shape, const Footprint& footprint, std::size_t extents) const {
  plan.extents = extents;
  plan.staging_slots = slots(shape, footprint);
  plan.host_slots = host_slots(shape, footprint);
  plan.serving_pieces = pieces(shape, footprint);
  plan.relay_pieces = placement_.relay_pieces(shape.fewest());
  plan.relay_piece_bytes = placement_.relay_piece_bytes();
  plan.passing_places = placement_.passing().places;
  plan.passing_place_bytes = placement_.passing().bytes;
  plan.bytes = bytes(plan, shape, footprint, extents);
  plan.device_bytes = sum(plan.bytes[index(Tier::kDevice)]);
  plan.peak_memory = sum(plan.bytes[index(Tier::kHost)]);
  plan.disk_bytes = sum(plan.bytes[index(Tier::kDisk)]);
}

}  // namespace sluice::engine
