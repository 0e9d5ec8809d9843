#include "engine/planner/shared_updates.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/bytes.h"

namespace sluice::engine {

using allocator::Tier;

namespace {

// Of the time that a step takes beyond computing without them, what the CPU's updates must save; and of a
// step, what fewer of them may lose.
constexpr double kWorthwhile = 0.1, kAsGood = 0.005;
// Parts of the choices, before the best of them is looked at closely, and how often it is; less often where a
// plan has more units than this, since each look makes a plan.
constexpr std::size_t kTried = 8, kCloser = 4, kManyUnits = 500;
constexpr double kImpossible = std::numeric_limits<double>::infinity();

// The units in the order in which the CPU gets them.
class Choices {
 public:
  Choices(const Placement& placement, const MachineRates& rates, const Plan& by_gpu) {
    const auto copying = [&](UnitId unit, const UnitPlan& plan) {
      const Placement::Traffic copied = placement.link_traffic(unit, plan);
      return copy_seconds(copied.read, copied.written, rates.gpu);
    };
    for (UnitId unit = 0; unit < by_gpu.units.size(); ++unit) {
      UnitPlan by_cpu = by_gpu.units[unit];
      by_cpu.updated_on = Tier::kHost;
      if (by_cpu.resident(Part::kState)) by_cpu.place(Part::kState, Tier::kHost);
      const double seconds = placement.update_seconds(unit, rates);
      if (seconds > 0)
        all_.push_back({unit, (copying(unit, by_gpu.units[unit]) - copying(unit, by_cpu)) / seconds});
    }
    std::ranges::stable_sort(all_, std::greater<>(), &Choice::gain);
  }

  std::size_t size() const { return all_.size(); }

  // So many units of which the CPU's time saves most copies. Of those that save as much it has some evenly,
  // so that both processors update in all of backward.
  std::vector<UnitId> first(std::size_t count) const {
    std::vector<UnitId> units;
    if (count == 0) return units;
    const auto alike = std::ranges::equal_range(all_, all_[count - 1].gain, std::greater<>(), &Choice::gain);
    for (auto choice = all_.begin(); choice != alike.begin(); ++choice) units.push_back(choice->unit);
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
  std::vector<Choice> all_;
};

class Sharing {
 public:
  Sharing(const Choices& choices, const ByGpuAlone& by_gpu, const PlannedSeconds& planned)
      : choices_(choices), units_(by_gpu.plan.units.size()), planned_(planned), seconds_(choices.size() + 1) {
    if (by_gpu.fits) seconds_[0] = by_gpu.seconds;
  }

  // The fewest units with which a step takes least.
  std::size_t best() {
    std::size_t best = 0;
    const auto look_at = [&](std::size_t count) {
      if (seconds(count) < (count < best ? 1 + kAsGood : 1 - kAsGood) * seconds(best)) best = count;
    };
    const std::size_t times = std::max<std::size_t>(1, choices_.size() / kManyUnits);
    const std::size_t tried = std::max<std::size_t>(2, kTried / times), looks = kCloser / times;
    std::size_t stride = std::max<std::size_t>(1, choices_.size() / tried);
    for (std::size_t count = stride; count <= choices_.size(); count += stride) look_at(count);
    look_at(choices_.size());
    for (std::size_t closer = 0; stride > 1 && closer < looks; ++closer) {
      stride = divide_up(stride, 2);
      const std::size_t middle = best;
      look_at(middle - std::min(middle, stride));
      look_at(std::min(choices_.size(), middle + stride));
    }
    return best;
  }

  std::vector<Tier> updated_on(std::size_t count) const {
    std::vector<Tier> tiers(units_, Tier::kDevice);
    for (const UnitId unit : choices_.first(count)) tiers[unit] = Tier::kHost;
    return tiers;
  }
  bool none_is_possible() const {
    return std::ranges::all_of(seconds_.begin() + 1, seconds_.end(), [](const std::optional<double>& known) {
      return !known || known == kImpossible;
    });
  }
  // Of a step; kImpossible where there is none.
  double seconds(std::size_t count) {
    std::optional<double>& known = seconds_[count];
    if (!known) known = count == 0 ? kImpossible : planned_(updated_on(count)).value_or(kImpossible);
    return *known;
  }

 private:
  const Choices& choices_;
  const std::size_t units_;
  const PlannedSeconds& planned_;
  std::vector<std::optional<double>> seconds_;  // of a step, by how many units the CPU updates
};

}  // namespace

std::optional<SharedUpdates> share_updates(const Placement& placement, const MachineRates& rates,
                                           const ByGpuAlone& by_gpu, double computing,
                                           const PlannedSeconds& planned) {
  const Choices choices(placement, rates, by_gpu.plan);
  Sharing sharing(choices, by_gpu, planned);
  const std::size_t count = sharing.best(), units = by_gpu.plan.units.size();
  const double after = sharing.seconds(count);
  if (after == kImpossible || (count == 0 && sharing.none_is_possible())) return std::nullopt;
  if (by_gpu.fits && by_gpu.seconds - after <= kWorthwhile * (by_gpu.seconds - computing))
    return SharedUpdates{sharing.updated_on(0),
                         fmt::format("the GPU, since the CPU would save less than a tenth of {:.2g} s a step",
                                     by_gpu.seconds - computing)};
  return SharedUpdates{
      sharing.updated_on(count),
      fmt::format("the GPU, and the CPU {} of {} units: a step takes {:.2g} s then{}, instead of {:.2g} s "
                  "by the GPU alone",
                  count, units, after, computing > 0 ? "" : ", without what the client computes",
                  by_gpu.seconds)};
}

}  // namespace sluice::engine
