#include "engine/plan/profile.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/layout/kind.h"

namespace sluice::engine {

namespace {

// Returns the largest m, n and k of all products; m is 0 where there are none.
kernels::Product largest_product(const std::vector<UnitSpec>& units, const optim::Optimizer& optimizer) {
  kernels::Product largest;
  for (const UnitSpec& unit : units)
    for (const ParameterSpec& parameter : unit.parameters) {
      if (!unit.trainable) continue;
      const kernels::Product product = optimizer.largest_product(kind_of(parameter));
      largest.m = std::max(largest.m, product.m);
      largest.n = std::max(largest.n, product.n);
      largest.k = std::max(largest.k, product.k);
    }
  return largest;
}

}  // namespace

double Work::flops() const { return std::accumulate(products.begin(), products.end(), attention); }

Work& Work::operator+=(const Work& other) {
  products.resize(std::max(products.size(), other.products.size()));
  for (std::size_t i = 0; i < other.products.size(); ++i) products[i] += other.products[i];
  attention += other.attention;
  bytes += other.bytes;
  received += other.received;
  from_hosts += other.from_hosts;
  waits += other.waits;
  return *this;
}

Profile any_order_profile(std::vector<UnitSpec> units, std::size_t held_units) {
  Profile profile;
  profile.units = std::move(units);
  profile.any_order = true;
  profile.held_units = held_units;
  profile.unit_profiles.resize(profile.units.size());
  for (UnitProfile& unit : profile.unit_profiles) unit.choices = {{"none", 0, {}, 0}};
  const auto count = static_cast<UnitId>(profile.units.size());
  for (UnitId unit = 0; unit < count; ++unit) profile.schedule.push_back({unit, true, -1, false});
  for (UnitId unit = count; unit-- > 0;) {
    const bool trainable = profile.units[unit].trainable;
    profile.schedule.push_back({unit, true, trainable ? 0 : -1, trainable});
  }
  return profile;
}

std::size_t Profile::repeats(std::size_t group) const {
  return whole_step ? 1 : divide_up(micro_batches, group);
}

Profile in_pipeline(const Profile& of_section, const Pipeline& pipeline, int section, std::size_t group) {
  if (pipeline.items > kMostItems)
    fail(ErrorCode::kInvalidArgument,
         "{} micro-batches pass through a pipeline in {} groups; at most {} groups are possible, so let more "
         "of them pass together",
         of_section.micro_batches, pipeline.items, kMostItems);
  ensure(pipeline.items == divide_up(of_section.micro_batches, group),
         "{} micro-batches are no {} groups of {}", of_section.micro_batches, pipeline.items, group);
  const std::vector<Access>& once = of_section.schedule;
  const auto backward = static_cast<std::size_t>(
      std::ranges::find_if(once, [](const Access& a) { return a.gradient_use >= 0 || a.final; }) -
      once.begin());
  const auto writes_again = [&](const Access& access) {
    return access.gradient_use >= 0 && std::any_of(once.data(), &access, [&](const Access& before) {
             return before.unit == access.unit && before.gradient_use == access.gradient_use;
           });
  };
  const auto weights = static_cast<std::size_t>(std::ranges::find_if(once, writes_again) - once.begin());
  ensure((weights < once.size()) == splits_backward(pipeline.order),
         "the schedule of a unit's passes is not that of a pipeline in the order {}",
         name_of(pipeline.order));
  // As in a step that repeats the schedule, a unit is computed forward at its first access, and backward at
  // its last one.
  std::vector<std::size_t> first(of_section.units.size(), once.size()), last(of_section.units.size());
  for (std::size_t i = 0; i < once.size(); ++i) {
    first[once[i].unit] = std::min(first[once[i].unit], i);
    if (i < weights) last[once[i].unit] = i;
  }
  const PipelineBuffers buffers = buffers_of(pipeline, section);
  const std::vector<std::size_t> held = items_held(pipeline, section);
  Profile profile = of_section;
  profile.schedule.clear();
  WholeStep& step = profile.whole_step.emplace();
  step.group = group;
  step.held.resize(profile.units.size());
  for (const Access& access : once)
    if (access.parameters || access.gradient_use >= 0) step.held[access.unit] = held[access.chunk];
  step.borders = buffers.outputs + buffers.borders;
  step.kept_for_weights = buffers.kept_for_weights;
  step.left_for_weights = buffers.left_for_weights;
  std::size_t messages = 0;  // of each micro-batch
  for (std::size_t chunk = 0; chunk < pipeline.chunks; ++chunk)
    messages += (pipeline.begins(section, chunk) ? 0 : 1) + (pipeline.ends(section, chunk) ? 0 : 1);
  step.received = messages * profile.micro_batches * profile.border_gradient_bytes;
  for (const Action& action : actions_of(pipeline, section)) {
    const auto [begin, end] = action.kind == Action::Kind::kForward    ? std::pair(std::size_t{0}, backward)
                              : action.kind == Action::Kind::kBackward ? std::pair(backward, weights)
                              : action.kind == Action::Kind::kWeights  ? std::pair(weights, once.size())
                                                                       : std::pair(weights, weights);
    for (std::size_t i = begin; i < end; ++i) {
      if (once[i].chunk != action.chunk) continue;
      const bool writes_nothing = !once[i].parameters && once[i].gradient_use < 0;
      if (writes_nothing && action.item + 1 < pipeline.items) continue;
      profile.schedule.push_back(once[i]);
      profile.schedule.back().final = once[i].final && action.item + 1 == pipeline.items;
      step.parts.push_back(
          {action.item, i == first[once[i].unit], i == last[once[i].unit], i >= weights && !writes_nothing});
    }
  }
  return profile;
}

std::size_t activation_bytes(const UnitProfile& unit, std::size_t choice, const ItemsHeld& items) {
  const ActivationChoice& chosen = unit.choices[choice];
  return items.activations * (unit.input_bytes + chosen.kept_bytes) +
         items.kept_for_weights * chosen.kept_for_weights_bytes +
         items.left_for_weights * chosen.left_for_weights_bytes;
}

std::size_t activation_bytes(const Profile& profile, std::span<const std::size_t> choices,
                             std::size_t group) {
  const std::optional<WholeStep>& step = profile.whole_step;
  std::size_t bytes = (step ? step->borders : 1) * profile.border_gradient_bytes;
  for (UnitId unit = 0; unit < choices.size(); ++unit)
    bytes += activation_bytes(
        profile.unit_profiles[unit], choices[unit],
        step ? ItemsHeld{step->held[unit], step->kept_for_weights, step->left_for_weights} : ItemsHeld());
  return group * bytes;
}

void check_masters(const std::vector<UnitSpec>& units, const optim::Optimizer& optimizer) {
  if (optimizer.keeps_master()) return;
  bool any_narrow = false;
  for (const UnitSpec& unit : units) {
    if (unit.trainable && unit.dtype == Dtype::kF16)
      fail(
          ErrorCode::kInvalidArgument,
          "unit '{}' has f16 parameters, and no masters are to be kept: below 2^-14 the distance between f16 "
          "values no longer shrinks with the value, so that stochastic rounding would drown small parameters "
          "in "
          "noise; keep the masters, or use bf16",
          unit.name);
    any_narrow |= unit.trainable && unit.dtype != Dtype::kF32;
  }
  if (!any_narrow)
    fail(ErrorCode::kInvalidArgument,
         "no masters are to be kept, but all parameters are f32, and each is its own; leave that out, or use "
         "bf16");
}

bool has_products(const std::vector<UnitSpec>& units, const optim::Optimizer& optimizer) {
  return largest_product(units, optimizer).m > 0;
}

std::size_t hidden_bytes(const std::vector<UnitSpec>& units, const optim::Optimizer& optimizer,
                         const kernels::F32Products& products) {
  const kernels::Product largest = largest_product(units, optimizer);
  return largest.m == 0 ? 0 : products.hidden_bytes(largest);
}

std::vector<int> gradient_uses(const Profile& profile) {
  std::vector<int> uses(profile.units.size());
  for (const Access& access : profile.schedule) {
    if (access.gradient_use < 0) continue;
    const UnitSpec& unit = profile.units[access.unit];
    if (!unit.trainable)
      fail(ErrorCode::kInvalidArgument, "unit '{}' is frozen, and the schedule asks for its gradient",
           unit.name);
    for (const ParameterSpec& parameter : unit.parameters)
      uses[access.unit] = std::max(uses[access.unit], parameter.uses);
  }
  return uses;
}

Dtype final_gradient_type(const Profile& profile, UnitId unit) {
  return profile.any_order ? Dtype::kF32 : profile.units[unit].dtype;
}

std::size_t final_gradient_bytes(std::size_t elements, Dtype type) {
  return std::max(kDiskBlock, round_up(elements * size_of(type), kDiskBlock));
}

std::vector<std::size_t> recompute_levels(const Profile& profile, const std::optional<std::string>& asked) {
  std::size_t count = 1;
  for (const UnitProfile& unit : profile.unit_profiles) count = std::max(count, unit.choices.size());
  std::vector<std::size_t> all(count);
  std::iota(all.begin(), all.end(), std::size_t{0});
  if (!asked || *asked == "auto") return all;
  std::set<std::string> known;
  for (const UnitProfile& unit : profile.unit_profiles)
    for (std::size_t level = 0; level < unit.choices.size(); ++level) {
      known.insert(unit.choices[level].name);
      if (unit.choices[level].name == *asked && (unit.choices.size() > 1 || all.size() == 1)) return {level};
    }
  std::string names;
  for (const std::string& name : known) names += (names.empty() ? "" : ", ") + name;
  fail(ErrorCode::kInvalidArgument, "'{}' is not a way to recompute; this model has auto, {}", *asked, names);
}

}  // namespace sluice::engine
