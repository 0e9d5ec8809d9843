#include "engine/step/gradients.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/bytes.h"
#include "engine/refusal.h"
#include "kernels/elementwise.h"
#include "kernels/reduce.h"

namespace sluice::engine {
namespace {
constexpr std::size_t kNoSuchUse = std::numeric_limits<std::size_t>::max();
}

Gradients::Gradients(const Layout& layout, const std::vector<int>& uses, const Plan& plan, bool any_order,
                     Pager& pager)
    : layout_(layout),
      pager_(pager),
      any_order_(any_order),
      outlive_step_(any_order && plan.clip),
      progress_(layout.parameters()),
      changed_(layout.units().size()) {
  for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
    const UnitSpec& spec = layout.units()[unit];
    std::vector<Buffer> buffers;
    for (int use = 0; use < uses[unit]; ++use) {
      Buffer buffer;
      buffer.elements = use_elements(layout, unit, use);
      std::size_t offset = 0;
      for (const ParameterSpec& parameter : spec.parameters) {
        buffer.offsets.push_back(parameter.uses > use ? offset : kNoSuchUse);
        if (parameter.uses > use) offset += round_up(parameter.elements(), kParameterAlignment);
      }
      const std::string name = "gradient of " + spec.name + (use == 0 ? "" : ", use " + std::to_string(use));
      const UnitPlan& placed = plan.units[unit];
      buffer.holding = pager.define({name, buffer.elements * sizeof(float), allocator::Purpose::kGradient,
                                     placed.tier(Part::kGradient), false, placed.gradient_stored,
                                     is_packed(layout.unit_bytes(unit))});
      buffers.push_back(std::move(buffer));
    }
    for (ParameterId p = layout.first_parameter(unit); p < layout.end_parameter(unit); ++p)
      progress_[p].last.resize(static_cast<std::size_t>(layout.spec(p).uses));
    units_.push_back(std::move(buffers));
  }
}

float* Gradients::data(ParameterId parameter, int use) const {
  const UnitId unit = layout_.place(parameter).unit;
  const Buffer& buffer = units_[unit][static_cast<std::size_t>(use)];
  const std::size_t offset = buffer.offsets[parameter - layout_.first_parameter(unit)];
  return reinterpret_cast<float*>(pager_.data(buffer.holding)) + offset;
}

float* Gradients::target(ParameterId parameter, int use, std::size_t micro_batch, bool* accumulate) {
  auto& last = progress_[parameter].last.at(static_cast<std::size_t>(use));
  if (last && *last >= micro_batch)
    refuse(
        ErrorCode::kState,
        "the gradient of '{}' for micro-batch {} comes after that of micro-batch {}; they are added in order",
        layout_.spec(parameter).name, micro_batch, *last);
  *accumulate = last.has_value();
  last = micro_batch;
  return data(parameter, use);
}

void Gradients::add(Threads& threads, ParameterId parameter, ConstArray gradient) {
  const std::size_t n = layout_.place(parameter).elements;
  float* const sum = data(parameter, 0);
  Progress& progress = progress_[parameter];
  const bool accumulate = has(parameter);
  if (accumulate && progress.factor != 1)
    kernels::scale(threads, n, static_cast<float>(progress.factor), {sum, Dtype::kF32});
  progress = {{0},
              kernels::store_summing_squares(threads, layout_.spec(parameter).span_first, n, gradient,
                                             accumulate, sum),
              1};
  changed_[layout_.place(parameter).unit] = true;
}

bool Gradients::take_changed(UnitId unit) {
  const bool changed = changed_[unit];
  changed_[unit] = false;
  return changed;
}

void Gradients::read(Threads& threads, ParameterId parameter, Array out) const {
  const std::size_t n = layout_.place(parameter).elements;
  kernels::convert(threads, n, {data(parameter, 0), Dtype::kF32}, out);
  const auto factor = static_cast<float>(progress_[parameter].factor);
  if (factor != 1) kernels::scale(threads, n, factor, out);
}

void Gradients::multiply(ParameterId parameter, double factor) { progress_[parameter].factor *= factor; }

void Gradients::drop(ParameterId parameter) {
  Progress& progress = progress_[parameter];
  std::fill(progress.last.begin(), progress.last.end(), std::nullopt);
  progress.squares = {};
  progress.factor = 1;
}

void Gradients::hand_over(UnitId unit) {
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p)
    progress_[p].last[0].reset();
}

void Gradients::drop_unit(UnitId unit) {
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p) drop(p);
}

void Gradients::drop_all() {
  for (ParameterId p = 0; p < progress_.size(); ++p) drop(p);
}

void Gradients::sum_squares_of(Threads& threads, ParameterId parameter, const void* base) {
  const Layout::Place& place = layout_.place(parameter);
  progress_[parameter].squares =
      kernels::sum_of_squares(threads, layout_.spec(parameter).span_first, place.elements,
                              ConstArray{base, final_type(place.unit)}.at(place.offset));
}

double Gradients::norm(ParameterId parameter) const {
  const Progress& progress = progress_[parameter];
  if (!progress.squares.finite) return std::numeric_limits<double>::infinity();
  return std::sqrt(progress.squares.sum.total()) * std::abs(progress.factor);
}

std::optional<ParameterId> Gradients::not_finite(UnitId unit) const {
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p)
    if (has(p) && (!progress_[p].squares.finite || !std::isfinite(progress_[p].factor))) return p;
  return std::nullopt;
}

std::optional<ParameterId> Gradients::not_finite() const {
  for (UnitId unit = 0; unit < units_.size(); ++unit)
    if (const auto parameter = not_finite(unit)) return parameter;
  return std::nullopt;
}

bool Gradients::has(ParameterId parameter) const {
  const auto& last = progress_[parameter].last;
  return std::any_of(last.begin(), last.end(), [](const auto& use) { return use.has_value(); });
}

bool Gradients::any(UnitId unit) const {
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p)
    if (has(p)) return true;
  return false;
}

std::optional<ParameterId> Gradients::finish(Threads& threads, UnitId unit) {
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p) {
    const std::size_t n = layout_.place(p).elements;
    for (int use = 0; use < layout_.spec(p).uses; ++use)
      if (!progress_[p].last[static_cast<std::size_t>(use)])
        kernels::fill(threads, n, 0.0f, {data(p, use), Dtype::kF32});
    for (int use = 1; use < layout_.spec(p).uses; ++use)
      kernels::add(threads, n, {data(p, 0), Dtype::kF32}, {data(p, use), Dtype::kF32},
                   {data(p, 0), Dtype::kF32});
  }
  void* base = pager_.data(holding(unit, 0));
  kernels::narrow_in_place(threads, layout_.unit_elements(unit), static_cast<float*>(base), final_type(unit));
  std::optional<ParameterId> not_finite;
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p) {
    sum_squares_of(threads, p, base);
    if (!progress_[p].squares.finite && !not_finite) not_finite = p;
  }
  return not_finite;
}

double Gradients::norm() const {
  double sum = 0;
  for (ParameterId p = 0; p < progress_.size();) {
    kernels::PartialSum squares = progress_[p].squares.sum;
    const double factor = progress_[p].factor;
    // What it has in the next units, where these have a gradient, too.
    for (++p; p < progress_.size() && layout_.spec(p).continues() && progress_[p].factor == factor &&
              progress_[p].squares.sum.first() == squares.end();
         ++p)
      squares.add(progress_[p].squares.sum);
    sum += squares.total() * factor * factor;
  }
  return std::sqrt(sum);
}

void Gradients::begin_step() {
  if (!outlive_step_) drop_all();
}

}  // namespace sluice::engine
