#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "float_array.h"
#include "optim/elementwise.h"

// An optimizer with three arrays of state for each element, for tests alone: Reddi, Kale, Kumar 2018,
// algorithm 2, without bias correction.
namespace sluice::engine::toy {

class Amsgrad final : public optim::Optimizer {
 public:
  explicit Amsgrad(const optim::Storage& storage) : Optimizer(optim::Settings("amsgrad"), storage) {}

  std::vector<optim::StateArray> state() const override {
    const Dtype type = storage().state;
    return {{"exp_avg", type},
            {"exp_avg_sq", type, optim::CodeMap::kUnsigned},
            {"max_exp_avg_sq", type, optim::CodeMap::kUnsigned}};
  }

  void apply(Threads& threads, const optim::Hyperparameters& h, const optim::Span& span) const override {
    const optim::GradientRule rule = optim::gradient_rule(h);
    const auto rate = static_cast<float>(h.learning_rate);
    const auto keep = static_cast<float>(1 - h.learning_rate * h.weight_decay);
    optim::for_each_range(threads, *this, h, span, [&](const optim::SpanRange& range) {
      std::array<std::vector<float>, 3> state;
      for (std::size_t array = 0; array < state.size(); ++array) state[array] = read(range, array);
      const std::vector<float> gradient = widened(range.count, range.gradient);
      for (std::size_t i = 0; i < range.count; ++i) {
        const float g = std::clamp(gradient[i] * rule.factor, -rule.bound, rule.bound);
        float &first = state[0][i], &second = state[1][i], &most = state[2][i];
        first = 0.9f * first + 0.1f * g;
        second = 0.95f * second + 0.05f * g * g;
        most = std::max(most, second);
        float& value = range.master[i];
        value = keep * value - rate * first / (std::sqrt(most) + 1e-8f);
        if (range.parameter.data != nullptr) narrow(value, range.parameter.at(i));
      }
      for (std::size_t array = 0; array < state.size(); ++array) write(range, array, state[array]);
    });
  }

 private:
  static std::vector<float> widened(std::size_t count, ConstArray values) {
    std::vector<float> wide(count);
    for (std::size_t i = 0; i < count; ++i) wide[i] = test::value_at(values, i);
    return wide;
  }
  static void narrow(float value, Array to) {
    if (to.type == Dtype::kF32) *to.f32() = value;
    if (to.type == Dtype::kBf16) *to.bf16() = to_bf16(value);
    if (to.type == Dtype::kF16) *to.f16() = to_f16(value);
  }
  static optim::CodeMap map_of(std::size_t array) {
    return array == 0 ? optim::CodeMap::kSigned : optim::CodeMap::kUnsigned;
  }

  static std::vector<float> read(const optim::SpanRange& range, std::size_t array) {
    const optim::StatePart& part = range.state[array];
    if (part.values.type != Dtype::kU8) return widened(range.count, part.values);
    std::vector<float> wide(range.count);
    optim::decode(range.count, map_of(array), static_cast<const std::uint8_t*>(part.values.data), part.scales,
                  wide.data());
    return wide;
  }
  static void write(const optim::SpanRange& range, std::size_t array, const std::vector<float>& values) {
    const optim::StatePart& part = range.state[array];
    if (part.values.type == Dtype::kU8)
      optim::encode(range.count, map_of(array), values.data(), static_cast<std::uint8_t*>(part.values.data),
                    part.scales);
    else
      for (std::size_t i = 0; i < range.count; ++i) narrow(values[i], part.values.at(i));
  }
};

}  // namespace sluice::engine::toy
