#include <algorithm>
#include <utility>

#include "core/bytes.h"
#include "engine/plan/placement.h"

// A step as a walk over its accesses.
namespace sluice::engine {
namespace {

std::vector<Placement::Positions> positions_of(const Profile& profile) {
  std::vector<Placement::Positions> all(profile.units.size());
  for (std::size_t i = profile.schedule.size(); i-- > 0;) all[profile.schedule[i].unit].first = i;
  for (std::size_t i = 0; i < profile.schedule.size(); ++i) {
    const Access& access = profile.schedule[i];
    Placement::Positions& of = all[access.unit];
    of.last = i;
    if (access.parameters) of.parameters.push_back(i);
    if (access.gradient_use >= 0 || access.final) of.gradient.push_back(i);
  }
  return all;
}

}  // namespace

double Placement::seconds(const Work& work, const MachineRates& rates) const {
  double seconds =
      work.bytes / rates.memory_bandwidth + work.attention / rates.attention.value_or(rates.flops);
  for (std::size_t i = 0; i < work.products.size(); ++i) {
    if (work.products[i] > 0) seconds += product_seconds(profile_.products[i], work.products[i], rates);
  }
  return seconds;
}

// Forward at the first access of a unit, backward at its last one, where its gradient is made final: read in
// f32, and written in the compute type where that is another.
void Placement::add_computing(UnitId unit, const UnitPlan& plan, std::size_t group, const MachineRates& rates,
                              const Positions& own, std::vector<Visit>& visits) const {
  const UnitProfile& profile = profile_.unit_profiles[unit];
  const ActivationChoice& choice = profile.choices[plan.choice];
  const double forward = seconds(profile.forward, rates);
  const double backward = seconds(profile.backward, rates) + seconds(choice.again, rates);
  const std::size_t length = profile_.schedule.size(), groups = visits.size() / length;
  for (std::size_t g = 0; g < groups; ++g) {
    const std::size_t micro_batches = std::min(group, profile_.micro_batches - g * group);
    Visit &first = visits[g * length + own.first], &last = visits[g * length + own.last];
    first.compute += static_cast<double>(micro_batches) * forward;
    last.compute += static_cast<double>(micro_batches) * backward;
    first.steps = last.steps = 1;
    if (own.first != own.last) first.steps = std::max<std::size_t>(1, micro_batches * choice.forward_steps);
    last.steps = std::max<std::size_t>(1, micro_batches * choice.backward_steps);
  }
  if (!updated(unit)) return;
  const Dtype type = profile_.any_order ? Dtype::kF32 : layout_.dtype(unit);
  const std::size_t moved = sizeof(float) + (type == Dtype::kF32 ? 0 : size_of(type));
  visits[(groups - 1) * length + own.last].compute +=
      static_cast<double>(layout_.unit_elements(unit) * moved) / rates.memory_bandwidth;
}

// An update that waits for all gradients comes before its unit's first access; one that does not follows the
// unit's last one.
std::vector<Visit> Placement::visits(const std::vector<UnitPlan>& units, std::size_t group,
                                     const MachineRates& rates) const {
  const std::size_t length = profile_.schedule.size(), groups = divide_up(profile_.micro_batches, group);
  const std::vector<Positions> positions = positions_of(profile_);
  std::vector<Visit> visits(groups * length);
  for (std::size_t i = 0; i < visits.size(); ++i) {
    const Access& access = profile_.schedule[i % length];
    const UnitPlan& plan = units[access.unit];
    visits[i].unit = access.unit;
    visits[i].frames = (access.parameters && !plan.resident(Part::kParameters)) ||
                       (!plan.resident(Part::kGradient) && (access.gradient_use >= 0 || access.final));
  }
  for (UnitId unit = 0; unit < units.size(); ++unit) {
    const Positions& own = positions[unit];
    const UnitPlan& plan = units[unit];
    add_computing(unit, plan, group, rates, own, visits);
    Visit &final = visits[(groups - 1) * length + own.last],
          &updated_at = waits(unit) ? visits[own.first] : final;
    UpdateWork& update = waits(unit) ? updated_at.before : updated_at.after;
    if (updated(unit)) update.seconds += update_seconds(unit, rates);
    update.chunks += format_.chunks(unit);
    const Traffic state = plan.resident(Part::kState) ? Traffic() : state_traffic(unit);
    update.read += state.read;
    update.written += state.written;
    if (!plan.resident(Part::kParameters)) {
      const Traffic traffic = parameter_traffic(unit, groups);
      updated_at.written += traffic.written;
      std::uint64_t left = traffic.read;
      for (std::size_t g = groups; g-- > 0;)  // the first one of the step may be left out
        for (std::size_t i = own.parameters.size(); i-- > 0 && left > 0;) {
          if (i > 0 && own.parameters[i] - own.parameters[i - 1] <= 2) continue;
          visits[g * length + own.parameters[i]].fetched += parameter_bytes(unit);
          left -= parameter_bytes(unit);
        }
      update.read += left;  // of a pass of their own, over units that are updated together
    }
    if (plan.resident(Part::kGradient) || !plan.gradient_stored || own.gradient.empty()) continue;
    const Traffic all = gradient_traffic(unit, groups), kept = kept_gradient_traffic(unit, groups);
    update.read += all.read - kept.read;
    final.written += all.written - kept.written;
    // What is kept meanwhile, evenly over the accesses that add to it.
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

}  // namespace sluice::engine
