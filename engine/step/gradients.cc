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

Gradients::Gradients(const Layout& layout, const std::vector<int>& uses, const Plan& plan, Pager& pager)
    : layout_(layout), pager_(pager), type_(plan.dtype), progress_(layout.parameters()) {
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
      buffer.holding = pager.define({name, buffer.elements * sizeof(float), allocator::Purpose::kGradient,
                                     plan.units[unit].gradient_resident});
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
  const Array sum = {data(parameter, 0), Dtype::kF32};
  if (has(parameter))
    kernels::add(threads, n, sum, gradient, sum);
  else
    kernels::convert(threads, n, gradient, sum);
  progress_[parameter].last[0] = 0;
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
  if (type_ == Dtype::kBf16)
    kernels::narrow_in_place(threads, layout_.unit_elements(unit), static_cast<float*>(base));
  std::optional<ParameterId> not_finite;
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p) {
    const Layout::Place& place = layout_.place(p);
    const auto squares =
        kernels::sum_of_squares(threads, place.elements, ConstArray{base, type_}.at(place.offset));
    progress_[p].square_sum = squares.sum;
    if (!squares.finite && !not_finite) not_finite = p;
  }
  return not_finite;
}

double Gradients::norm() const {
  double sum = 0;
  for (const Progress& progress : progress_) sum += progress.square_sum;
  return std::sqrt(sum);
}

void Gradients::begin_step() {
  for (Progress& progress : progress_) {
    std::fill(progress.last.begin(), progress.last.end(), std::nullopt);
    progress.square_sum = 0;
  }
}

}  // namespace sluice::engine
