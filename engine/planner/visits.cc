#include <algorithm>
#include <utility>

#include "core/bytes.h"
#include "engine/planner/placement.h"

// Describes a step as the visits over which walk() goes.
namespace sluice::engine {
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
  // What of that is for ranks that compute the micro-batch together.
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
    }
    if (part.backward) {
      visits[i].layers +=
          static_cast<double>(micro_batches) * times[unit].backward_layers[units[unit].choice];
      visits[i].received_while_computing +=
          micro_batches * (profile.backward.received + choice.again.received);
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
    if (updated(unit)) visits[(groups - 1) * length + own.last].compute += times[unit].final;
    Visit &final = visits[(groups - 1) * length + own.last],
          &updated_at = waits(unit) ? visits[own.first] : final;
    UpdateWork& update = waits(unit) ? updated_at.before : updated_at.after;
    update.seconds += times[unit].update;
    update.chunks += format_.shards().chunks(unit);
    const Received of_ranks = received(unit, plan);
    update.gathered += of_ranks.updated;
    final.summed += of_ranks.gradient;
    final.sum_in_frames = !plan.resident(Part::kGradient);
    for (int use = 0; of_ranks.early.bytes > 0 && use < uses_[unit]; ++use)
      if (sums_early(unit, plan, use))
        visits[(groups - 1) * length + own.last_writes[static_cast<std::size_t>(use)]].summed +=
            received_of_sum(unit, use);
    if (plan.tier(Part::kParameters) == allocator::Tier::kRanks && own.fetches > 0) {
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
    if (plan.tier(Part::kParameters) == allocator::Tier::kDisk) {
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
    // What is kept meanwhile counts evenly at the accesses that add to it.
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
    plan.step_bytes_from_hosts += hosts_.all_on_one() ? 0 : arriving.by_link;
    plan.step_bytes_read += visit.read_bytes();
    plan.step_bytes_written += visit.written_bytes();
  }
}

}  // namespace sluice::engine
