#include "engine/steps/core.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

namespace sluice::engine {

Core::Core(const Profile& profile, const Plan& the_plan, const optim::Optimizer& the_optimizer,
           const Resources& the_resources)
    : Stores(profile, the_plan, the_optimizer, the_resources),
      values(*this),
      applied(layout.parameters()),
      changes(layout.units().size()) {}

void Core::begin_step(const StepSettings& given) {
  if (in_step) refuse(ErrorCode::kState, "begin_step() is called twice without step()");
  if (given.clip > 0 && !plan.clip)
    refuse(ErrorCode::kInvalidArgument,
           "clipping by norm {} is asked for, and the plan was made without clipping", given.clip);
  settings = given;
  clip_factor = 1;
  ++steps;
  in_step = true;
}

void Core::check_settings(const StepSettings& given) const {
  // Loops compute with these numbers in f32.
  const auto finite = [](double value) { return std::isfinite(static_cast<float>(value)); };
  const auto usable = [&](double value) { return finite(value) && value >= 0; };
  for (const GroupSettings& group : given.groups) {
    if (!usable(group.learning_rate) || !usable(group.weight_decay))
      refuse(
          ErrorCode::kInvalidArgument,
          "a learning rate of {} and a weight decay of {} are given; both must be 0 or more, and finite in "
          "32 bits",
          group.learning_rate, group.weight_decay);
    if (group.settings != nullptr && group.settings->optimizer() != optimizer.name())
      refuse(ErrorCode::kInvalidArgument, "settings of {} are given, and the optimizer is {}",
             group.settings->optimizer(), optimizer.name());
  }
  const auto is_clip = [&](double value) {
    return usable(value) && (value == 0 || static_cast<float>(value) > 0);
  };
  if (!is_clip(given.clip) || !is_clip(given.clip_value) || !finite(given.gradient_factor))
    refuse(ErrorCode::kInvalidArgument,
           "a clip of {}, a clip by value of {} and a gradient factor of {} are given; all must be finite in "
           "32 bits, and the clips 0, or above 0 in 32 bits",
           given.clip, given.clip_value, given.gradient_factor);
  std::uint32_t needed = 0;
  for (ParameterId p = 0; p < layout.parameters(); ++p) needed = std::max(needed, layout.spec(p).group + 1);
  if (given.groups.size() < needed)
    refuse(ErrorCode::kInvalidArgument, "settings of {} parameter groups are given, and the model has {}",
           given.groups.size(), needed);
}

void Core::wait_for_ranks(const std::string& what, TransferGroup& group) {
  waits.during(Waits::For::kRanks, what, [&] { group.wait([this] { serve_ranks(); }); });
}

void Core::fail_with(const std::string& why) {
  failure = why;
  tell_ranks(why);
}

void Core::tell_ranks(const std::string& error) {
  if (comm::Communicator* const others = resources.others()) others->fail(error);
}

// Other ranks learn of an error before anything waits for them.
void Core::serve_ranks() {
  // Other sections, which wait for this one, have posted their receives long before.
  if (sections) report_work();
  try {
    queue.serve_ranks();
    if (ranks) values.serve(false);
  } catch (const std::exception& error) {
    tell_ranks(error.what());
    throw;
  }
}

void Core::gather_squares(std::span<const ParameterId> of) {
  std::vector<ParameterId> in_parts;
  std::ranges::copy_if(of, std::back_inserter(in_parts),
                       [&](ParameterId p) { return partitions_state(layout.location(p).unit); });
  if (in_parts.empty()) return;
  const std::string name = "the norm of the gradients";
  waits.during(Waits::For::kRanks, name, [&] {
    gradients.take_squares(in_parts,
                           ranks->exchange(name, gradients.squares(in_parts), [this] { serve_ranks(); }));
  });
}

Core::Measured Core::measure() {
  GradientSquares squares = gradients.all_squares();
  if (sections)
    waits.during(Waits::For::kRanks, "the norm of the gradients",
                 [&] { squares = sections->gather(squares, [this] { serve_ranks(); }); });
  Measured measured{{squares.norm() * std::abs(settings.gradient_factor), 1.0}, std::nullopt};
  if (squares.not_finite) measured.not_finite = std::move(squares.not_finite->name);
  return measured;
}

void Core::clip(StepResult& result) {
  // torch.nn.utils.clip_grad_norm_ adds the same 1e-6.
  if (settings.clip > 0) clip_factor = std::min(1.0, settings.clip / (result.gradient_norm + 1e-6));
  result.clip_factor = clip_factor;
}

bool Core::usable(const Measured& measured) {
  return !measured.not_finite &&
         measured.result.gradient_norm <= static_cast<double>(std::numeric_limits<float>::max());
}

void Core::refuse_not_finite(const Measured& measured) const {
  if (measured.not_finite)
    refuse(ErrorCode::kNotFinite, "the gradient of '{}' is not finite; no parameter was changed",
           *measured.not_finite);
  refuse(ErrorCode::kNotFinite,
         "the norm of the gradients is {} with a gradient factor of {}; no parameter was changed",
         measured.result.gradient_norm, settings.gradient_factor);
}

namespace {

// Whether a due update overwrites all parameters of the unit where they are computed with, and reads none,
// since the masters hold the values: then parameters elsewhere need not be brought to be overwritten.
bool is_only_overwritten(const Core& c, UnitId unit) {
  const HoldingId values = c.parameters[unit];
  if (!c.states.has_master(unit) || !c.plan.clip || c.partitions_parameters(unit) ||
      c.pager.resident(values) || c.pager.held(values) || !c.queue.needs_frames(unit, values))
    return false;
  for (ParameterId p = c.layout.first_parameter(unit); p < c.layout.end_parameter(unit); ++p)
    if (!c.gradients.has(p)) return false;
  return true;
}

}  // namespace

// A joint update acquires its memory pass by pass; an update that follows its gradient acquires all of it
// here.
void Core::enqueue(UnitRange units, bool with_parameters) {
  if (ranks) ranks->state_reads().wait_until_sent();  // an update may need the slot of an answer
  const bool keeps = !plan.clip && units.size() == 1;
  if (keeps) queue.start_shared();
  for (UnitId unit = units.first; unit < units.end; ++unit)
    if (partitions_parameters(unit)) {
      parameter_shards->expect(unit);
      pager.outdate(parameters[unit]);
    }
  const ParameterId first = layout.first_parameter(units.first);
  if (units.size() > 1)  // the spans of a parameter count updates together
    std::fill(applied.begin() + first, applied.begin() + layout.end_parameter(units.end - 1), applied[first]);
  std::vector<UpdateQueue::Due> all;
  for (UnitId unit = units.first; unit < units.end; ++unit) {
    ++changes[unit];
    all.push_back(due_of(unit));
    // Backward does not wait to learn whether a gradient is finite: the device that updates the unit checks.
    if (checks_on_gpu()) all.back().refused = gradients.check_on_gpu(unit, states.by_cpu(unit));
    entrust(unit);
    if (is_only_overwritten(*this, unit)) pager.forget(parameters[unit]);
    if (keeps) keep_until_applied(unit, with_parameters, all.back());
  }
  queue.add(units, std::move(all));
}

// Moves what the CPU updates, and a GPU computes with, from the GPU's frames to host memory or the disk.
void Core::entrust(UnitId unit) {
  if (!states.by_cpu(unit)) return;
  if (!partitions_parameters(unit) && !queue.needs_frames(unit, parameters[unit]))
    pager.entrust(parameters[unit]);
  if (entrusts_gradient(unit)) pager.entrust(gradients.holding(unit, 0));
}

bool Core::entrusts_gradient(UnitId unit) const {
  const UnitPlan& placed = plan.units[unit];
  return states.by_cpu(unit) && placed.gradient_stored &&
         placed.tier(Part::kGradient) == allocator::Tier::kHost;
}

UpdateQueue::Due Core::due_of(UnitId unit) {
  UpdateQueue::Due due;
  for (const GroupSettings& group : settings.groups)
    due.groups.push_back({group.learning_rate, group.weight_decay, clip_factor * settings.gradient_factor,
                          steps, settings.clip_value, group.settings});
  for (ParameterId p = layout.first_parameter(unit); p < layout.end_parameter(unit); ++p)
    due.parameters.push_back({gradients.has(p) ? ++applied[p] : 0, gradients.factor(p)});
  return due;
}

// Pins the gradient and the parameters that an update needs, so that later gradients do not evict them.
void Core::keep_until_applied(UnitId unit, bool with_parameters, UpdateQueue::Due& due) {
  due.holds_gradient = !entrusts_gradient(unit);
  if (due.holds_gradient) pager.acquire(gradients.holding(unit, 0), Pager::Use::kRead);
  const bool elsewhere = partitions_parameters(unit) || !queue.needs_frames(unit, parameters[unit]);
  due.holds_parameters = !elsewhere && (with_parameters || pager.present(parameters[unit]));
  if (due.holds_parameters) pager.acquire(parameters[unit], Pager::Use::kRead);
}

}  // namespace sluice::engine
