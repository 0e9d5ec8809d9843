#include <algorithm>

#include "core/bytes.h"
#include "engine/memory/device_ranks.h"
#include "engine/planner/device_walk.h"
#include "engine/planner/planner.h"
#include "engine/planner/shared_updates.h"

// Describes a plan's step as walk_on_gpu() goes over it.
namespace sluice::engine {
namespace {

using allocator::Tier;

// Of what the client computes, the part that is forward: a third, or a quarter where backward computes it
// again, which a plan does not know.
constexpr double kForward = 0.3;

double over_links(const Arriving& arriving, const MachineRates& rates) {
  return link_seconds(arriving.by_link, rates.link) + link_seconds(arriving.in_host, rates.host_link);
}

// Unless somebody knows better, a message takes a little less than those of communicator_bench on two cores
// that are busy.
double seconds_of_message(const MachineRates& rates) {
  constexpr double kAssumedLatency = 5e-5;
  return rates.link ? rates.link->latency : kAssumedLatency;
}

double between_gpus(const Arriving& arriving, const MachineRates& rates) {
  return rates.gpu.between > 0 ? static_cast<double>(arriving.bytes) / rates.gpu.between : 0;
}

bool on_disk(const UnitPlan& plan, Part part) { return plan.tier(part) == Tier::kDisk; }

// Where a unit is fetched once, it was still there for the other use: the last units for backward, and the
// first ones for the next step's forward. Those of earlier micro-batches count with the last one's forward.
void add_fetches(const Placement& placement, UnitId id, std::size_t units, const UnitPlan& plan,
                 UnitOnGpu& unit) {
  const std::uint64_t bytes = placement.parameter_bytes(id);
  const bool in_shards = plan.tier(Part::kParameters) == Tier::kRanks;
  const std::uint64_t fetches = bytes == 0  ? 0
                                : in_shards ? placement.fetches(id)
                                            : placement.parameter_traffic(id, 1).read / bytes;
  const bool late = id >= units / 2;
  unit.forward.fetched = fetches > 1 || (fetches == 1 && late) ? bytes : 0;
  unit.backward.fetched = fetches > 1 || (fetches == 1 && !late) ? bytes : 0;
  unit.forward.fetched += placement.fetches(id) * (placement.micro_batches() - 1) * bytes;
  if (on_disk(plan, Part::kParameters)) {
    unit.forward.from_disk = unit.forward.fetched;
    unit.backward.from_disk = unit.backward.fetched;
  }
}

// A gradient that waits elsewhere comes to each later micro-batch, and leaves after each of them.
void add_gradient(const Placement& placement, UnitId id, const UnitPlan& plan, UnitOnGpu& unit) {
  const Placement::Traffic kept = placement.kept_gradient_traffic(id, placement.micro_batches());
  const std::uint64_t final = placement.gradient_traffic(id, 1).written;
  unit.forward.fetched += kept.read;
  unit.forward.left = kept.written;
  unit.backward.left = final;
  if (!on_disk(plan, Part::kGradient)) return;
  unit.forward.from_disk += kept.read;
  unit.forward.to_disk = kept.written;
  unit.backward.to_disk = final;
}

void add_ranks(const Placement& placement, UnitId id, const UnitPlan& plan, const MachineRates& rates,
               UnitOnGpu& unit) {
  const Placement::OfRanks moved = placement.link_traffic_of_ranks(id, plan);
  const SecondsOfRanks seconds(placement, id, plan, rates);
  unit.sum = {moved.sum.written, moved.sum.read, seconds.sum, moved.kept};
  unit.gather = {moved.gather.written, moved.gather.read, seconds.gather};
  if (plan.tier(Part::kParameters) != Tier::kRanks) return;
  for (UnitOnGpu::Use* const use : {&unit.forward, &unit.backward}) {
    const std::uint64_t fetches = use->fetched / placement.parameter_bytes(id);
    use->from_ranks = seconds.fetch * static_cast<double>(fetches);
    use->fetched = placement.fetched_by_link(id, plan) * fetches;
  }
}

void walk_step(const Placement& placement, const MachineRates& rates, std::optional<double> computing,
               Plan& plan) {
  plan.device_time.computing = computing;
  plan.device_time.step = walk_on_gpu(units_on_gpu(placement, plan, rates, computing.value_or(0)),
                                      reach_on_gpu(placement, plan), rates);
}

}  // namespace

double seconds_of_ranks(const Arriving& arriving, const MachineRates& rates) {
  return std::max(over_links(arriving, rates),
                  static_cast<double>(arriving.bytes) * rates.rank_processor_seconds);
}

SecondsOfRanks::SecondsOfRanks(const Placement& placement, UnitId unit, const UnitPlan& plan,
                               const MachineRates& rates) {
  const Placement::Received received = placement.received(unit, plan);
  // Ranks tell each other when a piece is there.
  const auto telling = [&](bool on_gpus) {
    const std::size_t piece = DeviceRanks::pace(placement.layout(), on_gpus).elements;
    return static_cast<double>(divide_up(placement.layout().unit_elements(unit), piece)) *
           seconds_of_message(rates);
  };
  const Placement::Moved moved = placement.moved_of_shared(unit, plan);
  const auto seconds = [&](const Arriving& arriving, std::uint64_t in_host, bool on_gpus) {
    if (arriving.bytes == 0 && (on_gpus || in_host == 0)) return 0.0;
    if (on_gpus) return telling(true) + between_gpus(arriving, rates);
    if (!placement.reads_pieces(unit) || rates.rank_processor_seconds == 0)
      return seconds_of_ranks(arriving, rates);
    return telling(false) +
           std::max(over_links(arriving, rates), static_cast<double>(in_host) / rates.memory_bandwidth);
  };
  sum = seconds(received.gradient, moved.sum, placement.sums_on_gpus(plan));
  gather = seconds(received.updated, moved.gather, placement.gathers_on_gpus(plan));
  if (plan.tier(Part::kParameters) != Tier::kRanks) return;
  if (plan.shard_on_gpu() || placement.passes_shards())
    fetch = seconds_of_message(rates) + between_gpus(received.fetched, rates);
  else if (placement.copies_shards())
    fetch = seconds_of_message(rates);
  else
    fetch = seconds_of_ranks(received.fetched, rates);
}

std::vector<UnitOnGpu> units_on_gpu(const Placement& placement, const Plan& plan, const MachineRates& rates,
                                    double computing) {
  const Layout& layout = placement.layout();
  double all = 0;
  for (UnitId id = 0; id < plan.units.size(); ++id) all += static_cast<double>(layout.unit_elements(id));
  // Earlier micro-batches count with the last one's forward.
  const double last = placement.last_micro_batch();
  std::vector<UnitOnGpu> units(plan.units.size());
  for (UnitId id = 0; id < units.size(); ++id) {
    const UnitPlan& placed = plan.units[id];
    UnitOnGpu& unit = units[id];
    const double share = static_cast<double>(layout.unit_elements(id)) / all;
    unit.backward.compute = (1 - kForward) * share * last * computing;
    unit.forward.compute =
        last == 1 ? kForward * share * computing : share * computing - unit.backward.compute;
    const auto extents = [&](Part part, std::size_t bytes) {
      return placed.resident(part) ? 0 : divide_up(bytes, plan.extent_bytes);
    };
    unit.forward.extents = extents(Part::kParameters, placement.parameter_bytes(id));
    unit.backward.extents = unit.forward.extents + extents(Part::kGradient, placement.gradient_bytes(id));
    if (!placed.resident(Part::kParameters)) add_fetches(placement, id, units.size(), placed, unit);
    add_ranks(placement, id, placed, rates, unit);
    if (placement.gradient_bytes(id) == 0) continue;
    if (placed.gradient_stored && !placed.resident(Part::kGradient))
      add_gradient(placement, id, placed, unit);
    unit.by_cpu = placed.updated_by_cpu();
    unit.elements = layout.unit_elements(id);
    unit.update = Beside(placement, rates, id, placed).updating();
    const Placement::Traffic link = placement.link_traffic(id, placed);
    const std::uint64_t other_in =
        unit.forward.fetched + unit.backward.fetched + unit.sum.in + unit.gather.in;
    const std::uint64_t other_out =
        unit.forward.left + unit.backward.left + unit.sum.out + unit.sum.kept + unit.gather.out;
    unit.in = link.read - std::min(link.read, other_in);
    unit.out = link.written - std::min(link.written, other_out);
    if (on_disk(placed, Part::kParameters)) unit.written += placement.parameter_traffic(id, 1).written;
    if (on_disk(placed, Part::kState)) {
      unit.read += placement.state_traffic(id).read;
      unit.written += placement.state_traffic(id).written;
    }
    if (on_disk(placed, Part::kGradient) && placed.gradient_stored)
      unit.read += placement.gradient_traffic(id, 1, placement.brings_whole_gradient(id, placed)).read;
  }
  return units;
}

GpuReach reach_on_gpu(const Placement& placement, const Plan& plan) {
  GpuReach reach;
  reach.ahead = plan.prefetch;
  reach.extents = plan.extents;
  reach.in_backward = !plan.clip;
  reach.sums_beside = placement.ends_micro_batches();
  for (UnitId unit = 0; unit < plan.units.size(); ++unit)
    reach.settles = reach.settles || placement.settles(unit, plan.units[unit]);
  reach.gpu = {plan.chunk_elements, std::max<std::size_t>(1, plan.staging_slots)};
  reach.cpu = {plan.chunk_elements, std::max<std::size_t>(1, plan.host_slots)};
  const DeviceRanks::Pace pace = DeviceRanks::pace(placement.layout(), placement.meeting().on_gpus);
  reach.ranks = {std::max<std::size_t>(1, pace.elements), pace.pieces};
  return reach;
}

void predict_device_step(const Placement& placement, const MachineRates& rates,
                         std::optional<double> computing, Plan& plan) {
  Beside all;
  for (UnitId id = 0; id < plan.units.size(); ++id) {
    const UnitPlan& unit = plan.units[id];
    all.add(Beside(placement, rates, id, unit));
    plan.step_bytes_received += placement.received_bytes(id, unit, placement.micro_batches());
    plan.step_bytes_from_hosts += placement.received_from_hosts(id, unit);
    for (const Part part : {Part::kParameters, Part::kGradient, Part::kState}) {
      if (!on_disk(unit, part)) continue;
      const Placement::Traffic moved = placement.traffic(id, part, unit, placement.micro_batches(),
                                                         placement.brings_whole_gradient(id, unit));
      plan.step_bytes_read += moved.read;
      plan.step_bytes_written += moved.written;
    }
  }
  plan.step_bytes_in = all.copied.read;
  plan.step_bytes_out = all.copied.written;
  const double disk = disk_seconds(plan.step_bytes_read, plan.step_bytes_written, rates);
  plan.device_time = {all.copying(rates),    all.gpu, all.cpu, disk, all.ranks, rates.gpu,
                      rates.memory_bandwidth};
  walk_step(placement, rates, computing, plan);
}

void state_computing(const Profile& profile, const optim::Optimizer& optimizer, const MachineRates& rates,
                     double computing, Plan& plan) {
  PlanRequest request;
  request.clip = plan.clip;
  request.ranks = plan.ranks;
  request.stages = plan.stages();
  request.shards = plan.shard_place();
  if (plan.sums_in_backward)
    request.stage = plan.one_stage();
  else
    request.whole_gradients = true;
  // A small model's chunks end with its largest unit, which is no size that can be asked for.
  request.chunk_elements = round_up(plan.chunk_elements, kChunkGrain);
  request.compute = Tier::kDevice;
  walk_step(Placement(profile, optimizer, request), rates, computing, plan);
}

}  // namespace sluice::engine
