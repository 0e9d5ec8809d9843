#include <algorithm>
#include <utility>

#include "core/bytes.h"
#include "engine/memory/device_ranks.h"
#include "engine/planner/placement.h"

// Describes a step as walk() and walk_on_gpu() go over it.
namespace sluice::engine {

using allocator::Tier;

namespace {

class Pace {
 public:
  Pace(const std::vector<kernels::Product>& products, const MachineRates& rates) : rates_(rates) {
    for (const kernels::Product& product : products) each_.push_back(product_seconds(product, rates));
  }
  double seconds(const Work& work) const {
    double seconds =
        work.bytes / rates_.memory_bandwidth + work.attention / rates_.attention.value_or(rates_.flops);
    for (std::size_t i = 0; i < work.products.size(); ++i)
      if (work.products[i] > 0)
        seconds += rates_.are_limits ? work.products[i] / rates_.flops : work.products[i] * each_[i];
    return seconds + layers(work);
  }
  // Returns the seconds of these for messages of ranks that compute the micro-batch together.
  double layers(const Work& work) const {
    if (!rates_.layer_link) return 0;
    return static_cast<double>(work.received) / rates_.layer_link->bandwidth +
           static_cast<double>(work.waits) * rates_.layer_link->latency;
  }
  // How much of that passes while the rank computes.
  double hidden(const Work& beside) const {
    const double sums = layers(beside);
    return std::min(sums, seconds(beside) - sums);
  }

 private:
  const MachineRates& rates_;
  std::vector<double> each_;
};

// Of what the client computes, the part that is forward: a third, or a quarter where backward computes it
// again, which a plan does not know.
constexpr double kForward = 0.3;

// Unless somebody knows better, a message takes a little less than those of communicator_bench on two cores
// that are busy.
double seconds_of_message(const MachineRates& rates) {
  constexpr double kAssumedLatency = 5e-5;
  return rates.link ? rates.link->latency : kAssumedLatency;
}

double between_gpus(const Arriving& arriving, const MachineRates& rates) {
  return rates.gpu.between > 0 ? static_cast<double>(arriving.bytes) / rates.gpu.between : 0;
}

bool on_disk(const UnitPlan& plan, Part part) {
  return plan.tier(part) == Tier::kDisk || (part == Part::kParameters && plan.shard_on_disk);
}

// Where a unit is fetched once, it was still there for the other use: the last units for backward, and the
// first ones for the next step's forward. Fetches of earlier micro-batches count with the last one's forward.
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

// Sums of earlier micro-batches count with the last one's forward.
void add_ranks(const Placement& placement, UnitId id, const UnitPlan& plan, const MachineRates& rates,
               UnitOnGpu& unit) {
  const Placement::OfRanks moved = placement.link_traffic_of_ranks(id, plan);
  const Placement::SecondsOfRanks seconds = placement.ranks_seconds(id, plan, rates);
  unit.sum = {moved.sum.written, moved.sum.read, seconds.sum, moved.kept};
  unit.gather = {moved.gather.written, moved.gather.read, seconds.gather};
  const bool in_shards = plan.tier(Part::kParameters) == Tier::kRanks;
  for (UnitOnGpu::Use* const use : {&unit.forward, &unit.backward}) {
    if (!in_shards) break;
    const std::uint64_t fetches = use->fetched / placement.parameter_bytes(id);
    use->from_ranks = seconds.fetch * static_cast<double>(fetches);
    use->fetched = placement.fetched_by_link(id, plan) * fetches;
    use->from_disk = plan.shard_on_disk ? placement.shard_bytes(id) * fetches : 0;
  }
  const std::uint64_t earlier = placement.sums_in_step() - 1;
  unit.forward.from_ranks += static_cast<double>(earlier) * seconds.sum;
  unit.forward.fetched += earlier * (moved.sum.read + moved.kept);
  unit.forward.left += earlier * (moved.sum.written + moved.kept);
}

}  // namespace

// A gradient is read in f32 when it is made final, and written where the compute type is another.
std::vector<Placement::Times> Placement::times(const MachineRates& rates) const {
  const Pace pace(profile_.products, rates);
  std::vector<Times> all(units_.size());
  for (UnitId unit = 0; unit < all.size(); ++unit) {
    const UnitProfile& profile = profile_.unit_profiles[unit];
    Times& times = all[unit];
    times.forward = pace.seconds(profile.forward);
    times.forward_layers = pace.layers(profile.forward);
    times.weights = pace.seconds(profile.weights);
    const double hidden = pace.hidden(profile.beside);
    for (const ActivationChoice& choice : profile.choices) {
      times.backward.push_back(pace.seconds(profile.backward) + pace.seconds(choice.again) - hidden);
      times.backward_layers.push_back(pace.layers(profile.backward) + pace.layers(choice.again) - hidden);
    }
    times.update = update_seconds(unit, rates);
    const Dtype type = final_gradient_type(profile_, unit);
    const std::size_t moved = sizeof(float) + (type == Dtype::kF32 ? 0 : size_of(type));
    if (updated(unit))
      times.final = static_cast<double>(format_.shards().here(unit).size() * moved) / rates.memory_bandwidth;
  }
  return all;
}

// Forward is computed at a unit's first access, backward at its last; in a whole step, where that says so.
void Placement::add_computing(const std::vector<UnitPlan>& units, std::size_t group,
                              const std::vector<Times>& times, std::size_t all_micro_batches,
                              std::vector<Visit>& visits) const {
  const std::size_t length = profile_.schedule.size();
  for (std::size_t i = 0; i < visits.size(); ++i) {
    const UnitId unit = profile_.schedule[i % length].unit;
    const Positions& own = units_[unit].at;
    const WholeStep::Part part =
        profile_.whole_step ? profile_.whole_step->parts[i]
                            : WholeStep::Part{i / length, i % length == own.first, i % length == own.last};
    if (!part.forward && !part.backward && !part.weights) continue;
    const ActivationChoice& choice = profile_.unit_profiles[unit].choices[units[unit].choice];
    const std::size_t micro_batches = std::min(group, all_micro_batches - part.item * group);
    const UnitProfile& profile = profile_.unit_profiles[unit];
    if (part.forward) {
      visits[i].compute += static_cast<double>(micro_batches) * times[unit].forward;
      visits[i].layers += static_cast<double>(micro_batches) * times[unit].forward_layers;
      visits[i].received_while_computing += micro_batches * profile.forward.received;
      visits[i].from_hosts_while_computing += micro_batches * profile.forward.from_hosts;
    }
    if (part.backward) {
      visits[i].layers +=
          static_cast<double>(micro_batches) * times[unit].backward_layers[units[unit].choice];
      visits[i].received_while_computing +=
          micro_batches * (profile.backward.received + choice.again.received);
      visits[i].from_hosts_while_computing +=
          micro_batches * (profile.backward.from_hosts + choice.again.from_hosts);
      visits[i].compute += static_cast<double>(micro_batches) *
                           (times[unit].backward[units[unit].choice] - times[unit].weights);
    }
    if (part.weights) visits[i].compute += static_cast<double>(micro_batches) * times[unit].weights;
    visits[i].steps = std::max<std::size_t>(1, micro_batches * (part.backward  ? choice.backward_steps
                                                                : part.weights ? choice.weights_steps
                                                                               : choice.forward_steps));
  }
}

// An update that waits for all gradients comes before its unit's first access, another after its last.
std::vector<Visit> Placement::visits(const std::vector<UnitPlan>& units, std::size_t group,
                                     const std::vector<Times>& times, std::size_t micro_batches) const {
  const std::size_t length = profile_.schedule.size();
  const std::size_t groups = profile_.whole_step ? 1 : divide_up(micro_batches, group);
  std::vector<Visit> visits(groups * length);
  for (std::size_t i = 0; i < visits.size(); ++i) {
    const Access& access = profile_.schedule[i % length];
    const UnitPlan& plan = units[access.unit];
    visits[i].unit = access.unit;
    visits[i].frames = (access.parameters && !plan.resident(Part::kParameters)) ||
                       (!plan.resident(Part::kGradient) && (access.gradient_use >= 0 || access.final));
  }
  add_computing(units, group, times, micro_batches, visits);
  for (UnitId unit = 0; unit < units.size(); ++unit) {
    const Positions& own = units_[unit].at;
    const UnitPlan& plan = units[unit];
    Visit &final = visits[(groups - 1) * length + own.last],
          &updated_at = waits(unit) ? visits[own.first] : final;
    UpdateWork& update = waits(unit) ? updated_at.before : updated_at.after;
    update.seconds += times[unit].update;
    update.chunks += format_.shards().chunks(unit);
    const Received of_ranks = received(unit, plan);
    update.gathered += of_ranks.updated;
    for (std::size_t g = sums_each_backward() ? 0 : groups - 1; g < groups; ++g) {
      Visit& sum = visits[g * length + own.last];
      if (updated(unit)) sum.compute += times[unit].final;
      sum.summed += of_ranks.gradient;
      sum.sum_in_frames = !plan.resident(Part::kGradient);
      if (!plan.gradient_shard_in_record()) continue;
      if (g > 0) sum.fetched += gradient_record_bytes(unit);
      sum.written += gradient_record_bytes(unit);
    }
    if (plan.gradient_shard_in_record()) update.read += units_[unit].elements_read * sizeof(float);
    for (int use = 0; of_ranks.early.bytes > 0 && use < uses_[unit]; ++use)
      if (sums_early(unit, plan, use))
        visits[(groups - 1) * length + own.last_writes[static_cast<std::size_t>(use)]].summed +=
            received_of_sum(unit, use);
    if (plan.tier(Part::kParameters) == Tier::kRanks && own.fetches > 0) {
      const std::uint64_t fetches = own.fetches * groups;
      const std::uint64_t from_disk = plan.shard_on_disk ? fetched_of_shard(unit, groups) / fetches : 0;
      for (std::size_t g = 0; g < groups; ++g)
        for (std::size_t i = 0; i < own.parameters.size(); ++i)
          if (i == 0 || own.parameters[i] - own.parameters[i - 1] > 2) {
            visits[g * length + own.parameters[i]].pulled += of_ranks.fetched;
            visits[g * length + own.parameters[i]].fetched += from_disk;
          }
    }
    if (plan.shard_on_disk) {
      update.read += shard_traffic(unit).read;
      update.written += shard_traffic(unit).written;
    }
    const Traffic state = plan.resident(Part::kState) ? Traffic() : state_traffic(unit);
    update.read += state.read;
    update.written += state.written;
    if (plan.tier(Part::kParameters) == Tier::kDisk) {
      const Traffic traffic = parameter_traffic(unit, groups);
      updated_at.written += traffic.written;
      std::uint64_t left = traffic.read;
      for (std::size_t g = groups; g-- > 0;)  // the first fetch of the step may be left out
        for (std::size_t i = own.parameters.size(); i-- > 0 && left > 0;) {
          if (i > 0 && own.parameters[i] - own.parameters[i - 1] <= 2) continue;
          visits[g * length + own.parameters[i]].fetched += parameter_bytes(unit);
          left -= parameter_bytes(unit);
        }
      update.read += left;  // the pass of a joint update that reads values
    }
    if (plan.resident(Part::kGradient) || !plan.gradient_stored || own.gradient.empty()) continue;
    const Traffic all = gradient_traffic(unit, groups), kept = kept_gradient_traffic(unit, groups);
    update.read += all.read - kept.read;
    final.written += all.written - kept.written;
    // Traffic of a gradient that is kept meanwhile counts evenly at the accesses that add to it.
    const std::size_t uses = groups * own.gradient.size();
    for (std::size_t use = 0; use < uses; ++use) {
      Visit& visit = visits[use / own.gradient.size() * length + own.gradient[use % own.gradient.size()]];
      const auto share = [&](std::uint64_t bytes) { return bytes * (use + 1) / uses - bytes * use / uses; };
      visit.fetched += share(kept.read);
      visit.written += share(kept.written);
    }
  }
  return visits;
}

void Placement::count_bytes(const std::vector<Visit>& visits, Plan& plan) const {
  plan.step_bytes_from_sections += received_of_sections();
  plan.step_bytes_received += received_of_sections();
  for (const Visit& visit : visits) {
    const Arriving arriving = visit.arriving();
    plan.step_bytes_of_layers += visit.received_while_computing;
    plan.step_bytes_received += arriving.bytes + visit.received_while_computing;
    plan.step_bytes_from_hosts +=
        visit.from_hosts_while_computing + (hosts_.all_on_one() ? 0 : arriving.by_link);
    plan.step_bytes_read += visit.read_bytes();
    plan.step_bytes_written += visit.written_bytes();
  }
}

// ---- on a GPU ----

Placement::SecondsOfRanks Placement::ranks_seconds(UnitId unit, const UnitPlan& plan,
                                                   const MachineRates& rates) const {
  SecondsOfRanks result;
  const Received received = this->received(unit, plan);
  // Ranks tell each other when a piece is there.
  const auto telling = [&](bool on_gpus) {
    const std::size_t piece = DeviceRanks::pace(layout_, on_gpus).elements;
    return static_cast<double>(divide_up(layout_.unit_elements(unit), piece)) * seconds_of_message(rates);
  };
  const Moved moved = moved_of_shared(unit, plan);
  const auto seconds = [&](const Arriving& arriving, std::uint64_t in_host, bool on_gpus) {
    if (arriving.bytes == 0 && (on_gpus || in_host == 0)) return 0.0;
    if (on_gpus) return telling(true) + between_gpus(arriving, rates);
    if (!reads_pieces(unit) || rates.rank_processor_seconds == 0) return seconds_of_ranks(arriving, rates);
    return telling(false) +
           std::max(over_links(arriving, rates), static_cast<double>(in_host) / rates.memory_bandwidth);
  };
  result.sum = seconds(received.gradient, moved.sum, sums_on_gpus(plan));
  result.gather = seconds(received.updated, moved.gather, gathers_on_gpus(plan));
  if (plan.tier(Part::kParameters) != Tier::kRanks) return result;
  if (plan.shard_on_gpu() || passes_shards())
    result.fetch = seconds_of_message(rates) + between_gpus(received.fetched, rates);
  else if (copies_shards())
    result.fetch = seconds_of_message(rates);
  else
    result.fetch = seconds_of_ranks(received.fetched, rates);
  return result;
}

std::vector<UnitOnGpu> Placement::units_on_gpu(const Plan& plan, const MachineRates& rates,
                                               double computing) const {
  double all = 0;
  for (UnitId id = 0; id < plan.units.size(); ++id) all += static_cast<double>(layout_.unit_elements(id));
  // The part beside which ranks may sum is the last micro-batch; earlier ones count with its forward.
  const double last = ranks_.size > 1 ? 1 / static_cast<double>(profile_.micro_batches) : 1;
  std::vector<UnitOnGpu> units(plan.units.size());
  for (UnitId id = 0; id < units.size(); ++id) {
    const UnitPlan& placed = plan.units[id];
    UnitOnGpu& unit = units[id];
    const double share = static_cast<double>(layout_.unit_elements(id)) / all;
    unit.backward.compute = (1 - kForward) * share * last * computing;
    unit.forward.compute =
        last == 1 ? kForward * share * computing : share * computing - unit.backward.compute;
    const auto extents = [&](Part part, std::size_t bytes) {
      return placed.resident(part) ? 0 : divide_up(bytes, plan.extent_bytes);
    };
    unit.forward.extents = extents(Part::kParameters, parameter_bytes(id));
    unit.backward.extents = unit.forward.extents + extents(Part::kGradient, gradient_bytes(id));
    if (!placed.resident(Part::kParameters)) add_fetches(*this, id, units.size(), placed, unit);
    const std::uint64_t brought = unit.forward.from_disk + unit.backward.from_disk;
    add_ranks(*this, id, placed, rates, unit);
    if (gradient_bytes(id) == 0) continue;
    if (placed.gradient_stored && !placed.resident(Part::kGradient)) add_gradient(*this, id, placed, unit);
    unit.by_cpu = placed.updated_by_cpu();
    unit.elements = layout_.unit_elements(id);
    unit.update = update_seconds(id, placed, rates);
    const Traffic link = link_traffic(id, placed);
    const std::uint64_t other_in =
        unit.forward.fetched + unit.backward.fetched + unit.sum.in + unit.gather.in;
    const std::uint64_t other_out =
        unit.forward.left + unit.backward.left + unit.sum.out + unit.sum.kept + unit.gather.out;
    unit.in = link.read - std::min(link.read, other_in);
    unit.out = link.written - std::min(link.written, other_out);
    if (on_disk(placed, Part::kParameters)) {
      const Traffic moved = disk_traffic_of_gpu(id, Part::kParameters, placed);
      unit.read += placed.shard_on_disk ? shard_traffic(id).read : moved.read - std::min(moved.read, brought);
      unit.written += moved.written;
    }
    if (on_disk(placed, Part::kState)) {
      unit.read += state_traffic(id).read;
      unit.written += state_traffic(id).written;
    }
    if (on_disk(placed, Part::kGradient) && placed.gradient_stored) {
      const Traffic summed = summed_gradient_traffic(id, placed);
      unit.read += gradient_traffic(id, 1, brings_whole_gradient(id, placed)).read + summed.read;
      unit.written += summed.written;
    }
  }
  return units;
}

GpuReach Placement::reach_on_gpu(const Plan& plan) const {
  GpuReach reach;
  reach.ahead = plan.prefetch;
  reach.extents = plan.extents;
  reach.in_backward = !plan.clip;
  reach.sums_beside = profile_.ends_micro_batches;
  for (UnitId unit = 0; unit < plan.units.size(); ++unit)
    reach.settles = reach.settles || settles(unit, plan.units[unit]);
  reach.gpu = {plan.chunk_elements, std::max<std::size_t>(1, plan.staging_slots)};
  reach.cpu = {plan.chunk_elements, std::max<std::size_t>(1, plan.host_slots)};
  const DeviceRanks::Pace pace = DeviceRanks::pace(layout_, meeting().on_gpus);
  reach.ranks = {std::max<std::size_t>(1, pace.elements), pace.pieces};
  return reach;
}

void Placement::predict_on_gpu(const MachineRates& rates, std::optional<double> computing, Plan& plan) const {
  DeviceTime& time = plan.device_time;
  Traffic copied;
  for (UnitId id = 0; id < plan.units.size(); ++id) {
    const UnitPlan& unit = plan.units[id];
    const Traffic link = link_traffic(id, unit);
    copied.read += link.read;
    copied.written += link.written;
    (unit.updated_by_cpu() ? time.cpu_updates : time.gpu_updates) += update_seconds(id, unit, rates);
    const SecondsOfRanks of_ranks = ranks_seconds(id, unit, rates);
    time.ranks += static_cast<double>(sums_in_step()) * of_ranks.sum + of_ranks.gather +
                  static_cast<double>(fetches(id) * micro_batches()) * of_ranks.fetch;
    plan.step_bytes_received += received_bytes(id, unit, micro_batches());
    plan.step_bytes_from_hosts += received_from_hosts(id, unit);
    for (const Part part : {Part::kParameters, Part::kGradient, Part::kState}) {
      if (!on_disk(unit, part)) continue;
      const Traffic moved = disk_traffic_of_gpu(id, part, unit);
      plan.step_bytes_read += moved.read;
      plan.step_bytes_written += moved.written;
    }
  }
  plan.step_bytes_read_apart = plan.step_bytes_read + read_apart(plan.units, 1);
  plan.step_bytes_in = copied.read;
  plan.step_bytes_out = copied.written;
  time.link = copy_seconds(copied.read, copied.written, rates.gpu);
  time.disk = disk_seconds(plan.step_bytes_read, plan.step_bytes_written, rates);
  time.rates = rates.gpu;
  time.cpu_memory = rates.memory_bandwidth;
  walk_on_gpu(rates, computing, plan);
}

void Placement::walk_on_gpu(const MachineRates& rates, std::optional<double> computing, Plan& plan) const {
  plan.device_time.computing = computing;
  plan.device_time.step =
      engine::walk_on_gpu(units_on_gpu(plan, rates, computing.value_or(0)), reach_on_gpu(plan), rates);
}

}  // namespace sluice::engine
