#include "engine/gradients/gradients.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/plan/micro_batch_sums.h"
#include "kernels/elementwise.h"
#include "kernels/reduce.h"

namespace sluice::engine {
namespace {
constexpr std::size_t kNoSuchUse = std::numeric_limits<std::size_t>::max();
}

Gradients::Gradients(const Layout& layout, const Profile& profile, const Plan& plan, const Ranks* ranks,
                     Pager& pager, DeviceWork* gpu)
    : layout_(layout),
      ranks_(ranks),
      pager_(pager),
      twin_(profile.twin),
      waiting_bytes_(plan.sums_bytes),
      known_(layout.parameters()),
      on_gpu_(gpu == nullptr ? nullptr : std::make_unique<DeviceGradients>(layout, *gpu)) {
  if (gpu != nullptr && plan.sums_each_backward) {
    std::vector<ElementRange> own;
    for (UnitId unit = 0; unit < layout.units().size(); ++unit) own.push_back(ranks->own(unit));
    parts_on_gpu_ = std::make_unique<DeviceGradients>(layout, *gpu, std::move(own));
  }
  const std::vector<int> uses = gradient_uses(profile);
  const std::vector<std::size_t> sums = gradient_buffers(
      profile, MicroBatchSums(plan.reproducible, plan.ranks, profile.micro_batches, profile.pieces),
      plan.group);
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
      const std::size_t stored =
          placed.gradient_in_shards
              ? final_gradient_bytes(ranks->own(unit).size(), final_gradient_type(profile, unit))
              : 0;
      for (std::size_t sum = 0; sum < sums[unit]; ++sum)
        buffer.holdings.push_back(
            pager.define({.name = name + (sum == 0 ? "" : ", sum " + std::to_string(sum)),
                          .bytes = buffer.elements * sizeof(float),
                          .purpose = allocator::Purpose::kGradient,
                          .tier = placed.tier(Part::kGradient),
                          .stored = placed.gradient_stored,
                          .packed = is_packed(layout.unit_bytes(unit)),
                          .stored_bytes = stored}));
      buffers.push_back(std::move(buffer));
    }
    units_.push_back(std::move(buffers));
    types_.push_back(final_gradient_type(profile, unit));
  }
}

std::size_t Gradients::offset(ParameterId parameter, int use) const {
  const UnitId unit = layout_.location(parameter).unit;
  return units_[unit][static_cast<std::size_t>(use)].offsets[parameter - layout_.first_parameter(unit)];
}

float* Gradients::data(ParameterId parameter, int use) const {
  return sum(layout_.location(parameter).unit, use, 0, 0) + offset(parameter, use);
}

float* Gradients::sum(UnitId unit, int use, std::size_t below, std::size_t waiting_from) const {
  const Buffer& buffer = units_[unit][static_cast<std::size_t>(use)];
  if (below < buffer.holdings.size()) return reinterpret_cast<float*>(pager_.data(buffer.holdings[below]));
  return reinterpret_cast<float*>(waiting_.data()) + waiting_from +
         (below - buffer.holdings.size()) * buffer.elements;
}

Array Gradients::on_gpu(ParameterId parameter) const {
  const UnitId unit = layout_.location(parameter).unit;
  return Array{pager_.data(holding(unit, 0)), types_[unit]}.at(offset(parameter, 0));
}

void Gradients::add_on_gpu(ParameterId parameter, ConstArray gradient) {
  const UnitId unit = layout_.location(parameter).unit;
  Known& known = known_[parameter];
  Dtype& type = types_[unit];
  if (!any_in_buffer(unit)) {
    type = ranks_ == nullptr || ranks_->reads_others(unit) ? gradient.type : Dtype::kF32;
  } else if (type != Dtype::kF32 && (known.in_buffer() || type != gradient.type)) {
    widen(unit);
  }
  on_gpu_->add(parameter, on_gpu(parameter), gradient, known.in_buffer(),
               static_cast<float>(known.in_buffer() ? known.factor : 1));
  known = {true, {}, 1, true};
}

void Gradients::add(Threads& threads, ParameterId parameter, ConstArray gradient) {
  if (on_gpu_) return add_on_gpu(parameter, gradient);
  const std::size_t n = layout_.location(parameter).elements;
  float* const sum = data(parameter, 0);
  Known& known = known_[parameter];
  const bool accumulates = known.in_buffer();
  if (accumulates && known.factor != 1)
    kernels::scale(threads, n, static_cast<float>(known.factor), {sum, Dtype::kF32});
  known = {true,
           kernels::store_summing_squares(threads, layout_.spec(parameter).span_first, n, gradient,
                                          accumulates, sum),
           1, false};
}

void Gradients::add_to_part(Threads& threads, ParameterId parameter, ElementRange elements, ConstArray mean,
                            double factor, Array part) {
  Known& known = known_[parameter];
  const auto scale = static_cast<float>(factor);
  if (parts_on_gpu_) {
    known.squares_on_gpu = true;
    return parts_on_gpu_->add_to_part(parameter, elements, part, mean, scale);
  }
  const ElementRange all = elements_of(layout_, parameter);
  const bool begins =
      elements.begin == std::max(all.begin, ranks_->own(layout_.location(parameter).unit).begin);
  if (scale != 1) kernels::scale(threads, elements.size(), scale, part);
  const kernels::SquareSum squares =
      kernels::store_summing_squares(threads, layout_.spec(parameter).span_first + elements.begin - all.begin,
                                     elements.size(), mean, true, part.f32());
  if (begins) known.squares = {kernels::PartialSum(squares.sum.first()), true};
  known.squares.sum.add(squares.sum);
  known.squares.finite &= squares.finite;
}

const Gradients::Known& Gradients::known(ParameterId parameter) const {
  const bool apart = known_[parameter].apart;
  if (!known_[parameter].squares_on_gpu) return known_[parameter];
  DeviceGradients& on_gpu = apart ? *parts_on_gpu_ : *on_gpu_;
  on_gpu.fetch_squares();
  for (ParameterId p = 0; p < known_.size(); ++p)
    if (known_[p].apart == apart && std::exchange(known_[p].squares_on_gpu, false))
      known_[p].squares = on_gpu.squares(p);
  return known_[parameter];
}

void Gradients::read(Threads& threads, ParameterId parameter, Array out) const {
  const std::size_t n = layout_.location(parameter).elements;
  if (on_gpu_)
    return on_gpu_->read(parameter, on_gpu(parameter), static_cast<float>(known_[parameter].factor), out);
  kernels::convert(threads, n, {data(parameter, 0), Dtype::kF32}, out);
  const auto factor = static_cast<float>(known_[parameter].factor);
  if (factor != 1) kernels::scale(threads, n, factor, out);
}

void Gradients::hand_over(UnitId unit) {
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p)
    known_[p].there = false;
}

// A part that is kept outside of the buffer is f32.
void Gradients::drop(ParameterId parameter) {
  if (!has(parameter)) return;
  known_[parameter] = {};
  const UnitId unit = layout_.location(parameter).unit;
  if (any(unit) && !any_in_buffer(unit)) types_[unit] = Dtype::kF32;
}

void Gradients::drop_unit(UnitId unit) {
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p) known_[p] = {};
}

void Gradients::drop_all() { std::ranges::fill(known_, Known{}); }

// Other ranks' gradients, for which the zeros stand in, are summed in f32, and so is the rest of the unit.
void Gradients::fill_with_zeros(Threads& threads, ParameterId parameter) {
  if (on_gpu_) {
    widen(layout_.location(parameter).unit);
    return on_gpu_->fill_with_zeros(parameter, on_gpu(parameter));
  }
  kernels::fill(threads, layout_.location(parameter).elements, 0.0f, {data(parameter, 0), Dtype::kF32});
}

void Gradients::scale(Threads& threads, ParameterId parameter, double factor) {
  if (on_gpu_) return on_gpu_->scale(parameter, on_gpu(parameter), static_cast<float>(factor));
  kernels::scale(threads, layout_.location(parameter).elements, static_cast<float>(factor),
                 {data(parameter, 0), Dtype::kF32});
}

void Gradients::widen(UnitId unit) {
  Dtype& type = types_[unit];
  if (type != Dtype::kF32 && any_in_buffer(unit))
    on_gpu_->widen({pager_.data(holding(unit, 0)), type}, units_[unit][0].elements);
  type = Dtype::kF32;
}

kernels::SquareSum squares_within(const Layout& layout, Threads& threads, ParameterId parameter,
                                  ConstArray values, ElementRange elements) {
  const ElementRange all = elements_of(layout, parameter), both = intersection(elements, all);
  const std::size_t first = layout.spec(parameter).span_first + both.begin - all.begin;
  if (both.size() == 0) return {kernels::PartialSum(first / kernels::kGridBlock), true};
  return kernels::sum_of_squares(threads, first, both.size(), values.at(both.begin - elements.begin));
}

std::string Gradients::squares(std::span<const ParameterId> parameters) const {
  std::string bytes;
  const auto put = [&](const auto& value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  };
  for (const ParameterId p : parameters) {
    const Known& known = this->known(p);
    put(known.squares.finite);
    put(known.squares.sum.first());
    const std::vector<kernels::PartialSum::Node> nodes = known.squares.sum.nodes();
    put(nodes.size());
    for (const kernels::PartialSum::Node& node : nodes) {
      put(node.value);
      put(node.level);
    }
  }
  return bytes;
}

void Gradients::take_squares(std::span<const ParameterId> parameters,
                             const std::vector<std::string>& of_ranks) {
  std::vector<std::size_t> at(of_ranks.size());
  for (const ParameterId p : parameters) {
    Known& known = known_[p];
    std::optional<kernels::PartialSum> sum;
    known.squares.finite = true;
    for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
      const auto get = [&](auto value) {
        ensure(of_ranks[rank].size() - at[rank] >= sizeof value, "rank {} has sent too few squares", rank);
        std::memcpy(&value, of_ranks[rank].data() + at[rank], sizeof value);
        at[rank] += sizeof value;
        return value;
      };
      known.squares.finite &= get(bool());
      const std::size_t first = get(std::size_t()), nodes = get(std::size_t());
      if (nodes > 0 && !sum) sum.emplace(first);
      for (std::size_t i = 0; i < nodes; ++i) {
        const double value = get(double());
        sum->add(kernels::PartialSum::Node{value, get(std::uint8_t())});
      }
    }
    if (sum) known.squares.sum = *sum;
  }
}

double Gradients::norm(ParameterId parameter) const {
  const Known& known = this->known(parameter);
  return std::sqrt(known.squares.sum.total()) * std::abs(known.factor);
}

std::optional<ParameterId> Gradients::not_finite(UnitId unit) const {
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p)
    if (has(p) && (!known(p).squares.finite || !std::isfinite(known_[p].factor))) return p;
  return std::nullopt;
}

std::optional<ParameterId> Gradients::not_finite() const {
  for (UnitId unit = 0; unit < units_.size(); ++unit)
    if (const auto parameter = not_finite(unit)) return parameter;
  return std::nullopt;
}

const std::uint32_t* Gradients::check_on_gpu(UnitId unit, bool for_cpu) {
  return on_gpu_->check(
      unit, [this](ParameterId p) { return has(p); }, for_cpu);
}

std::optional<ParameterId> Gradients::not_finite_factor(UnitId unit) const {
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p)
    if (has(p) && !std::isfinite(known_[p].factor)) return p;
  return std::nullopt;
}

std::optional<ParameterId> Gradients::not_finite_of_step() const {
  for (ParameterId p = 0; p < known_.size(); ++p)
    if (!has(p) && !known(p).squares.finite) return p;
  return std::nullopt;
}

bool Gradients::any(UnitId unit) const {
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p)
    if (has(p)) return true;
  return false;
}

bool Gradients::any_in_buffer(UnitId unit) const {
  for (ParameterId p = layout_.first_parameter(unit); p < layout_.end_parameter(unit); ++p)
    if (known_[p].in_buffer()) return true;
  return false;
}

GradientSquares Gradients::all_squares() const {
  GradientSquares all;
  const auto is_copy = [&](ParameterId p) {
    return twin_ && twin_->is_copy && layout_.location(p).unit == twin_->unit;
  };
  for (ParameterId p = 0; p < known_.size();) {
    const ParameterId first = p;
    kernels::PartialSum squares = known(p).squares.sum;
    const double factor = known_[p].factor;
    // Adds the squares of the parameter's spans in the next units, where these have a gradient, too.
    for (++p; p < known_.size() && layout_.spec(p).continues() && known_[p].factor == factor &&
              known_[p].squares.sum.first() == squares.end();
         ++p)
      squares.add(known_[p].squares.sum);
    if (!is_copy(first))
      all.terms.push_back({layout_.logical_index(first), squares.total() * factor * factor});
  }
  if (const auto bad = not_finite()) all.not_finite = {layout_.logical_index(*bad), layout_.spec(*bad).name};
  return all;
}

}  // namespace sluice::engine
