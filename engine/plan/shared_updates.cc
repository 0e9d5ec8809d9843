#include "engine/plan/shared_updates.h"

#include <fmt/format.h>

namespace sluice::engine {

using allocator::Tier;

namespace {

// Of the time without them, what the CPU's updates must save.
constexpr double kWorthwhile = 0.1;

struct Choice {
  UnitId unit;
  Beside by_gpu, by_cpu;
  double gain;  // seconds of copies that are saved for each of the CPU
};

}  // namespace

std::pair<std::vector<Tier>, std::string> share_updates(const Placement& placement, const MachineRates& rates,
                                                        const Plan& by_gpu) {
  std::vector<Tier> updated_on(by_gpu.units.size(), Tier::kDevice);
  std::vector<Choice> choices;
  Beside alone;
  for (UnitId unit = 0; unit < by_gpu.units.size(); ++unit) {
    UnitPlan plan = by_gpu.units[unit];
    const Beside now(placement, rates, unit, plan);
    plan.updated_on = Tier::kHost;
    const Beside then(placement, rates, unit, plan);
    alone.add(now);
    const double saved = now.copying(rates) - then.copying(rates);
    if (then.cpu > 0 && saved > 0 && !by_gpu.units[unit].resident(Part::kState))
      choices.push_back({unit, now, then, saved / then.cpu});
  }
  std::ranges::stable_sort(choices, std::greater<>(), &Choice::gain);
  Beside shared = alone;
  std::vector<UnitId> by_cpu;
  for (const Choice& choice : choices) {
    Beside next = shared;
    next.remove(choice.by_gpu);
    next.add(choice.by_cpu);
    if (next.seconds(rates) >= shared.seconds(rates)) break;
    shared = next;
    by_cpu.push_back(choice.unit);
  }
  const double before = alone.seconds(rates), after = shared.seconds(rates);
  if (before - after <= kWorthwhile * before)
    return {updated_on,
            fmt::format("the GPU, since the CPU would save less than a tenth of {:.2g} s a step", before)};
  for (const UnitId unit : by_cpu) updated_on[unit] = Tier::kHost;
  return {
      updated_on,
      fmt::format("the GPU, and the CPU {} of {} units: a step's copies take {:.2g} s then, beside {:.2g} "
                  "s of the GPU's updates and {:.2g} s of the CPU's, instead of {:.2g} s and {:.2g} s by "
                  "the GPU alone",
                  by_cpu.size(), by_gpu.units.size(), shared.copying(rates), shared.gpu, shared.cpu,
                  alone.copying(rates), alone.gpu)};
}

}  // namespace sluice::engine
