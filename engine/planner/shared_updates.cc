#include "engine/planner/shared_updates.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "core/bytes.h"

namespace sluice::engine {

using allocator::Tier;

namespace {

// Of the time that a step takes beyond computing without them, what the CPU's updates must save; and of a
// step, what fewer of them may lose.
constexpr double kWorthwhile = 0.1, kAsGood = 0.005;
constexpr std::size_t kTried = 8;  // parts of the choices, before the best of them is looked at closely

class Sharing {
 public:
  Sharing(const Placement& placement, const MachineRates& rates, const Plan& by_gpu, double computing)
      : placement_(placement), rates_(rates), by_gpu_(by_gpu), computing_(computing) {
    for (UnitId unit = 0; unit < by_gpu.units.size(); ++unit) {
      if (by_gpu.units[unit].resident(Part::kState)) continue;
      UnitPlan by_cpu = by_gpu.units[unit];
      by_cpu.updated_on = Tier::kHost;
      const double saved = copying(unit, by_gpu.units[unit]) - copying(unit, by_cpu);
      const double seconds = placement.update_seconds(unit, rates);
      if (seconds > 0 && saved > 0) choices_.push_back({unit, saved / seconds});
    }
    std::ranges::stable_sort(choices_, std::greater<>(), &Choice::gain);
    seconds_.resize(choices_.size() + 1);
  }

  // The fewest units with which a step takes least.
  std::size_t best() {
    std::size_t best = 0;
    const auto look_at = [&](std::size_t count) {
      if (seconds(count) < (count < best ? 1 + kAsGood : 1 - kAsGood) * seconds(best)) best = count;
    };
    std::size_t stride = std::max<std::size_t>(1, choices_.size() / kTried);
    for (std::size_t count = stride; count <= choices_.size(); count += stride) look_at(count);
    look_at(choices_.size());
    while (stride > 1) {
      stride = divide_up(stride, 2);
      const std::size_t middle = best;
      look_at(middle - std::min(middle, stride));
      look_at(std::min(choices_.size(), middle + stride));
    }
    return best;
  }

  double seconds(std::size_t count) {
    std::optional<double>& known = seconds_[count];
    if (!known) {
      Plan plan = by_gpu_;
      for (const UnitId unit : chosen(count)) plan.units[unit].updated_on = Tier::kHost;
      placement_.walk_on_gpu(rates_, computing_, plan);
      known = plan.device_time.step;
    }
    return *known;
  }

  // So many units of which the CPU's time saves most copies. Of those that save as much it has some evenly,
  // so that both processors update in all of backward.
  std::vector<UnitId> chosen(std::size_t count) const {
    std::vector<UnitId> units;
    if (count == 0) return units;
    const auto alike =
        std::ranges::equal_range(choices_, choices_[count - 1].gain, std::greater<>(), &Choice::gain);
    for (auto choice = choices_.begin(); choice != alike.begin(); ++choice) units.push_back(choice->unit);
    const std::size_t wanted = count - units.size(), all = alike.size();
    for (std::size_t i = 0; i < all; ++i)
      if ((i + 1) * wanted / all > i * wanted / all) units.push_back(alike[i].unit);
    return units;
  }

 private:
  struct Choice {
    UnitId unit;
    double gain;  // seconds of copies that are saved for each of the CPU
  };
  double copying(UnitId unit, const UnitPlan& plan) const {
    const Placement::Traffic copied = placement_.link_traffic(unit, plan);
    return copy_seconds(copied.read, copied.written, rates_.gpu);
  }

  const Placement& placement_;
  const MachineRates& rates_;
  const Plan& by_gpu_;
  const double computing_;
  std::vector<Choice> choices_;
  std::vector<std::optional<double>> seconds_;  // of a step, by how many units the CPU updates
};

}  // namespace

std::pair<std::vector<Tier>, std::string> share_updates(const Placement& placement, const MachineRates& rates,
                                                        const Plan& by_gpu, double computing) {
  std::vector<Tier> updated_on(by_gpu.units.size(), Tier::kDevice);
  Sharing sharing(placement, rates, by_gpu, computing);
  const std::size_t count = sharing.best();
  const double before = sharing.seconds(0), after = sharing.seconds(count);
  if (before - after <= kWorthwhile * (before - computing))
    return {updated_on, fmt::format("the GPU, since the CPU would save less than a tenth of {:.2g} s a step",
                                    before - computing)};
  for (const UnitId unit : sharing.chosen(count)) updated_on[unit] = Tier::kHost;
  return {
      updated_on,
      fmt::format("the GPU, and the CPU {} of {} units: a step takes {:.2g} s then{}, instead of {:.2g} s "
                  "by the GPU alone",
                  count, by_gpu.units.size(), after,
                  computing > 0 ? "" : ", without what the client computes", before)};
}

}  // namespace sluice::engine
