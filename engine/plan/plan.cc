#include "engine/plan/plan.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/plan/placement.h"
#include "engine/step/update_pipeline.h"

namespace sluice::engine {
namespace {

using allocator::Purpose;
using allocator::Tier;

constexpr std::size_t kLeastStagingSlots = 3, kMostStagingSlots = 32;
constexpr std::size_t kMostGrains = 16;            // of a chunk
constexpr double kShortestUpdate = 0.0005;         // seconds, of a chunk: less is lost in waking the threads
constexpr double kMostBandwidth = 50e9;            // that chunks grow with: staging takes memory
constexpr std::size_t kUnitsForLonger = 12;        // that frames of more than two accesses ahead are for
constexpr std::size_t kSmallUnit = kHugePage / 4;  // units up to this are not worth moving

std::size_t index(Purpose purpose) { return static_cast<std::size_t>(purpose); }
std::size_t index(Tier tier) { return static_cast<std::size_t>(tier); }

// One way to run: everything but what is resident.
struct Shape {
  std::size_t group = 1;
  std::size_t level = 0;  // of recomputation: the index into each unit's choices, as far as it has that many
  Lookahead lookahead;
  std::size_t slots = kLeastStagingSlots;
};

class Planner {
 public:
  Planner(const Profile& profile, const optim::Optimizer& optimizer, const Budget& budget,
          const PlanRequest& request, const MachineRates& rates)
      : profile_(profile),
        optimizer_(optimizer),
        budget_(budget),
        request_(request),
        rates_(rates),
        placement_(profile, optimizer, request) {
    check_request();
  }

  Plan best() const {
    const std::optional<Plan> found = find();
    if (!found) refuse();
    return *found;
  }

  // Nothing where none fits.
  std::optional<Plan> find() const {
    std::optional<Plan> best;
    for (const Shape& shape : shapes())
      for (const bool parameters_first : {false, true}) {
        std::optional<Plan> plan = fill(shape, parameters_first);
        if (plan) predict_time(*plan, shape.lookahead);
        if (plan && (!best || faster(*plan, *best))) best = std::move(plan);
      }
    return best;
  }

 private:
  void check_request() const {
    if (request_.group && (*request_.group == 0 || *request_.group > profile_.micro_batches))
      fail(ErrorCode::kInvalidArgument, "a group of {} micro-batches is asked for, and a step has {}",
           *request_.group, profile_.micro_batches);
    if (request_.prefetch && *request_.prefetch == 0)
      fail(ErrorCode::kInvalidArgument, "a prefetch depth of 0 is asked for; the least is 1");
  }

  std::size_t deepest_level() const {
    std::size_t deepest = 0;
    for (const UnitProfile& unit : profile_.unit_profiles)
      deepest = std::max(deepest, unit.choices.size() - 1);
    return deepest;
  }

  std::vector<std::size_t> levels() const {
    std::vector<std::size_t> all(deepest_level() + 1);
    std::iota(all.begin(), all.end(), std::size_t{0});
    if (!request_.recompute || *request_.recompute == "auto") return all;
    std::set<std::string> known;
    for (const UnitProfile& unit : profile_.unit_profiles)
      for (std::size_t level = 0; level < unit.choices.size(); ++level) {
        known.insert(unit.choices[level].name);
        if (unit.choices[level].name == *request_.recompute && (unit.choices.size() > 1 || all.size() == 1))
          return {level};
      }
    std::string names;
    for (const std::string& name : known) names += (names.empty() ? "" : ", ") + name;
    fail(ErrorCode::kInvalidArgument, "nothing is known to recompute as '{}'; this model has auto, {}",
         *request_.recompute, names);
  }

  std::vector<std::size_t> group_sizes() const {
    if (request_.group) return {*request_.group};
    std::set<std::size_t> sizes;
    for (std::size_t groups = 1; groups <= profile_.micro_batches; ++groups)
      sizes.insert(divide_up(profile_.micro_batches, groups));
    return {sizes.rbegin(), sizes.rend()};
  }

  std::vector<Lookahead> lookaheads() const {
    if (request_.prefetch) return {{*request_.prefetch, true}, {*request_.prefetch, false}};
    std::vector<Lookahead> all = {{2, true}, {1, true}, {1, false}};
    // Of a model of few units the frames for more than two accesses would be most of it.
    if (profile_.units.size() >= kUnitsForLonger) all.insert(all.begin(), {4, true});
    return all;
  }

  // In any order chunks are updated between the client's accesses alone: those of a unit are to arrive
  // meanwhile.
  std::size_t chunks_of_typical_unit() const {
    std::vector<std::size_t> chunks;
    for (UnitId unit = 0; unit < profile_.units.size(); ++unit)
      if (placement_.state_bytes(unit) > 0) chunks.push_back(placement_.format().chunks(unit));
    if (chunks.empty()) return 0;
    const auto median = chunks.begin() + static_cast<std::ptrdiff_t>(chunks.size() / 2);
    std::nth_element(chunks.begin(), median, chunks.end());
    return *median;
  }

  // One that is updated, and as many that are read, and written, as keep the disk at its pace: while one of
  // them ends, the others are to fill the queue.
  std::vector<std::size_t> slot_counts() const {
    const std::size_t slot = UpdatePipeline::slot_bytes(placement_.format());
    const std::size_t one_way = 1 + divide_up(rates_.disk_in_flight, std::max<std::size_t>(slot, 1));
    const std::size_t between = profile_.any_order ? chunks_of_typical_unit() : 0;
    const std::size_t wanted =
        std::clamp(1 + std::max(2 * one_way, one_way + between), kLeastStagingSlots, kMostStagingSlots);
    if (wanted == kLeastStagingSlots) return {wanted};
    return {wanted, kLeastStagingSlots};
  }

  std::vector<Shape> shapes() const {
    std::vector<Shape> result;
    for (const std::size_t group : group_sizes())
      for (const std::size_t level : levels())
        for (const Lookahead& lookahead : lookaheads())
          for (const std::size_t slots : slot_counts()) result.push_back({group, level, lookahead, slots});
    return result;
  }

  std::vector<UnitPlan> units_at(const Shape& shape, bool resident) const {
    const std::size_t groups = divide_up(profile_.micro_batches, shape.group);
    std::vector<UnitPlan> units(profile_.units.size());
    for (UnitId unit = 0; unit < units.size(); ++unit) {
      const bool small = placement_.parameter_bytes(unit) <= kSmallUnit;
      const auto place = [&](Part part, std::size_t bytes) {
        const Tier chosen = resident || small ? kComputeTier : Tier::kDisk;
        units[unit].place(part, bytes == 0 ? kComputeTier : request_.place(part).value_or(chosen));
      };
      place(Part::kParameters, placement_.parameter_bytes(unit));
      place(Part::kGradient, placement_.gradient_bytes(unit));
      place(Part::kState, placement_.state_bytes(unit));
      units[unit].gradient_stored =
          placement_.gradient_bytes(unit) == 0 || placement_.stores_gradient(unit, groups);
      if (!units[unit].gradient_stored) units[unit].place(Part::kGradient, Tier::kDisk);
      units[unit].choice = std::min(shape.level, profile_.unit_profiles[unit].choices.size() - 1);
    }
    return units;
  }

  // Nothing resident but what is small or asked for; then, while it fits, what saves most traffic for its
  // bytes.
  std::optional<Plan> fill(const Shape& shape, bool parameters_first) const {
    Plan everything = describe(shape, units_at(shape, true));
    if (fits(everything)) return everything;
    Plan plan = describe(shape, units_at(shape, false));
    if (!fits(plan) && !parameters_first) return std::nullopt;
    for (const Item& item : items(shape, parameters_first)) {
      std::vector<UnitPlan> units = plan.units;
      units[item.unit].place(item.part, kComputeTier);
      Plan larger = describe(shape, units);
      // With parameters first, it may fit only when the last of them frees the frames.
      if (fits(larger) || (parameters_first && item.part == Part::kParameters)) plan = std::move(larger);
    }
    return fits(plan) ? std::optional<Plan>(plan) : std::nullopt;
  }

  struct Item {
    UnitId unit;
    Part part;
    double gain;  // bytes of traffic saved for each byte held
  };

  std::vector<Item> items(const Shape& shape, bool parameters_first) const {
    const std::size_t groups = divide_up(profile_.micro_batches, shape.group);
    const std::vector<UnitPlan> placed = units_at(shape, false);
    std::vector<Item> result;
    const auto offer = [&](UnitId unit, Part part, std::uint64_t saved, std::size_t held) {
      if (placed[unit].resident(part) || request_.place(part) || saved == 0) return;
      result.push_back({unit, part, static_cast<double>(saved) / static_cast<double>(held)});
    };
    for (UnitId unit = 0; unit < placed.size(); ++unit) {
      offer(unit, Part::kParameters, placement_.parameter_traffic(unit, groups).total(),
            placement_.parameter_bytes(unit));
      if (placed[unit].gradient_stored)
        offer(unit, Part::kGradient, placement_.gradient_traffic(unit, groups).total(),
              placement_.gradient_bytes(unit));
      offer(unit, Part::kState, placement_.state_traffic(unit).total(), placement_.state_bytes(unit));
    }
    std::stable_sort(result.begin(), result.end(), [&](const Item& a, const Item& b) {
      const bool a_first = parameters_first && a.part == Part::kParameters;
      const bool b_first = parameters_first && b.part == Part::kParameters;
      return a_first != b_first ? a_first : a.gain > b.gain;
    });
    return result;
  }

  Plan describe(const Shape& shape, std::vector<UnitPlan> units) const {
    Plan plan;
    plan.clip = request_.clip;
    plan.group = shape.group;
    plan.prefetch = shape.lookahead.prefetch;
    plan.extents = placement_.extents(units, shape.lookahead);
    // Few enough mappings, whatever the size of the pool.
    plan.extent_bytes = kHugePage;
    plan.chunk_elements = placement_.format().chunk_elements();
    plan.state_bytes_per_parameter = placement_.element_bytes();
    const std::size_t scratch = placement_.needs_scratch() ? 1 : 0;
    plan.staging_slots = placement_.needs_staging(units) ? shape.slots : scratch;
    plan.activation_bytes = placement_.activation_bytes(units, shape.group);
    plan.workspace_bytes = placement_.workspace_bytes(units);
    plan.units = std::move(units);
    predict_memory(plan);
    return plan;
  }

  void predict_memory(Plan& plan) const {
    auto& host = plan.bytes[index(Tier::kHost)];
    host = placement_.resident_bytes(plan.units);
    host[index(Purpose::kParameter)] += plan.extents * plan.extent_bytes;
    host[index(Purpose::kActivation)] = round_up(plan.activation_bytes, kHugePage);
    host[index(Purpose::kWorkspace)] = round_up(plan.workspace_bytes, kHugePage) + profile_.hidden_bytes +
                                       round_up(placement_.rounds().bytes, kHugePage);
    const std::size_t slots = plan.staging_slots * UpdatePipeline::slot_bytes(placement_.format());
    host[index(Purpose::kStaging)] = round_up(slots, kHugePage);
    host[index(Purpose::kBase)] = budget_.base + placement_.metadata_bytes(plan.units);
    plan.bytes[index(Tier::kDisk)] = placement_.disk_bytes(plan.units);
    plan.peak_memory = std::accumulate(host.begin(), host.end(), std::uint64_t{0});
    const auto& disk = plan.bytes[index(Tier::kDisk)];
    plan.disk_bytes = std::accumulate(disk.begin(), disk.end(), std::uint64_t{0});
  }

  void predict_time(Plan& plan, const Lookahead& lookahead) const {
    const std::vector<Visit> visits = placement_.visits(plan.units, plan.group, rates_);
    for (const Visit& visit : visits) {
      plan.step_bytes_read += visit.read_bytes();
      plan.step_bytes_written += visit.written_bytes();
    }
    const std::size_t held = profile_.any_order ? profile_.held_units : 1;
    plan.time =
        walk(visits, {plan.prefetch, held + lookahead.ahead(), std::max<std::size_t>(1, plan.staging_slots)},
             rates_);
  }

  bool fits(const Plan& plan) const {
    return plan.peak_memory <= budget_.memory && plan.disk_bytes <= budget_.disk;
  }

  // Time first; then less wear of the disk; then, where something is brought in, a longer look-ahead; then
  // less memory.
  static bool faster(const Plan& a, const Plan& b) {
    if (std::abs(a.time.step - b.time.step) > 0.005 * b.time.step) return a.time.step < b.time.step;
    const auto traffic = [](const Plan& p) {
      return static_cast<double>(p.step_bytes_read + p.step_bytes_written);
    };
    if (std::abs(traffic(a) - traffic(b)) > 0.05 * traffic(b)) return traffic(a) < traffic(b);
    if (a.uses_disk() && a.prefetch != b.prefetch) return a.prefetch > b.prefetch;
    if (a.staging_slots != b.staging_slots) return a.staging_slots > b.staging_slots;
    return a.peak_memory < b.peak_memory;
  }

  [[noreturn]] void refuse() const {
    Shape least{1, levels().back(), lookaheads().back(), kLeastStagingSlots};
    if (request_.group) least.group = *request_.group;
    const Plan in_memory = describe(least, units_at(least, true));
    const Plan on_disk = describe(least, units_at(least, false));
    const std::string asked =
        fmt::format("this model does not fit in {} of memory", format_size(budget_.memory));
    if (on_disk.peak_memory > budget_.memory) refuse_rounds(on_disk);
    if (on_disk.peak_memory > budget_.memory)
      fail(ErrorCode::kBudget,
           "{}: memory is short by {}; with everything on disk that can be{} it needs {} "
           "({} activations and workspace, {} frames, staging and what stays, {} the process). Give "
           "{}{}{}",
           asked, format_size(on_disk.peak_memory - budget_.memory),
           profile_.any_order || !request_.trains ? "" : ", all recomputed, and one micro-batch at a time",
           format_size(on_disk.peak_memory), format_size(on_disk.activation_bytes + on_disk.workspace_bytes),
           format_size(on_disk.peak_memory - on_disk.activation_bytes - on_disk.workspace_bytes -
                       budget_.base),
           format_size(budget_.base), memory_of(on_disk),
           budget_.disk >= on_disk.disk_bytes ? "" : " and " + disk_of(on_disk),
           !request_.trains ? ""
           : request_.flags ? ", or a smaller --batch or --seq"
                            : ", or less that is reserved, or smaller units");
    if (in_memory.peak_memory <= budget_.memory)
      fail(ErrorCode::kBudget, "what is asked to be on disk takes {}, and the disk folders lend {}; give {}",
           format_size(on_disk.disk_bytes), format_size(budget_.disk), disk_of(on_disk));
    if (budget_.disk == 0)
      fail(ErrorCode::kBudget, "{}: memory is short by {} and no disk is given. Add {}, or give {}", asked,
           format_size(in_memory.peak_memory - budget_.memory), disk_of(on_disk), memory_of(in_memory));
    fail(ErrorCode::kBudget, "{}: the disk's {} are short by {}. Give the disk folders {} in all, or {}",
         asked, format_size(budget_.disk),
         format_size(on_disk.disk_bytes - std::min(on_disk.disk_bytes, budget_.disk)),
         format_argument(on_disk.disk_bytes), memory_of(in_memory));
  }

  // Where it is what the optimizer needs of a parameter as a whole that is too much.
  void refuse_rounds(const Plan& least) const {
    const RoundsNeed& need = placement_.rounds();
    if (least.peak_memory - need.bytes > budget_.memory) return;
    fail(ErrorCode::kBudget,
         "this model does not fit in {} of memory: {} must have {} in memory as a whole to update it, with "
         "what "
         "else is computed with it {} ({} of its values, {} of workspace), and memory is short by {}, with "
         "everything else on disk that can be. Give {}{}, or use an optimizer that works by elements",
         format_size(budget_.memory), optimizer_.name(), placement_.largest_of_rounds(),
         format_size(need.bytes), format_size(need.scratch_bytes),
         format_size(need.bytes - need.scratch_bytes), format_size(least.peak_memory - budget_.memory),
         memory_of(least), budget_.disk >= least.disk_bytes ? "" : " and " + disk_of(least));
  }

  std::string memory_of(const Plan& plan) const {
    const std::uint64_t more = kMiB;  // the next process is not of exactly this one's size
    return (request_.flags ? "--memory " : "memory=") + format_argument(plan.peak_memory + more);
  }
  std::string disk_of(const Plan& plan) const {
    return (request_.flags ? "--disk FOLDER:" : "a disk folder with ") + format_argument(plan.disk_bytes);
  }

  // A size as the command line takes it, rounded up.
  static std::string format_argument(std::uint64_t bytes) {
    return fmt::format("{}MiB", divide_up(bytes, kMiB));
  }

  const Profile& profile_;
  const optim::Optimizer& optimizer_;
  Budget budget_;
  PlanRequest request_;
  MachineRates rates_;
  Placement placement_;
};

// The smallest chunk whose update is long enough for this machine's memory. moved: bytes for each element.
std::size_t chunk_for(double moved, const MachineRates& rates) {
  const double bandwidth = std::min(rates.memory_bandwidth, kMostBandwidth);
  std::size_t grains = 1;
  while (grains < kMostGrains &&
         static_cast<double>(grains * kChunkGrain) * moved / bandwidth < kShortestUpdate)
    grains *= 2;
  return grains * kChunkGrain;
}

}  // namespace

Plan make_plan(const Profile& profile, const optim::Optimizer& optimizer, const Budget& budget,
               const PlanRequest& request, const MachineRates& rates) {
  const std::size_t chunk = chunk_for(Placement(profile, optimizer, request).least_update_bytes(), rates);
  if (!request.chunk_elements && chunk > kChunkGrain) {
    PlanRequest larger = request;
    larger.chunk_elements = chunk;
    if (const std::optional<Plan> plan = Planner(profile, optimizer, budget, larger, rates).find())
      return *plan;
  }
  return Planner(profile, optimizer, budget, request, rates).best();
}

}  // namespace sluice::engine
