#include <cmath>

#include "kernels/simd.h"
#include "optim/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/adam.cc"
#include <hwy/foreach_target.h>

#include "optim/update-inl.h"

#ifndef SLUICE_OPTIM_ADAM_TYPES
#define SLUICE_OPTIM_ADAM_TYPES
namespace sluice::optim {

// The constants of a step, computed in f64 and rounded once.
struct AdamFactors {
  GradientRule gradient;
  float decay;                      // AdamW: 1 - lr * weight_decay; Adam: weight_decay
  float first_decay, first_rate;    // beta1, 1 - beta1
  float second_decay, second_rate;  // beta2, 1 - beta2
  float step_size;                  // lr / (1 - beta1^t)
  float root_scale;                 // 1 / sqrt(1 - beta2^t)
  float epsilon;
};

}  // namespace sluice::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {

// With kDecoupled the decay goes into the parameter (AdamW), else into the gradient (Adam).
template <bool kDecoupled>
HWY_INLINE void update_range(const AdamFactors& factors, const SpanRange& range) {
  update_elements<2>(range, factors.gradient, [f = factors](auto, Elements& e) SLUICE_BODY {
    using simd::mul_add, simd::set;
    auto gradient = e.gradient;
    if constexpr (!kDecoupled) gradient = mul_add(e.value, set(f.decay), gradient);
    e.first = mul_add(e.first, set(f.first_decay), hn::Mul(gradient, set(f.first_rate)));
    const auto square = hn::Mul(hn::Mul(gradient, gradient), set(f.second_rate));
    e.second = mul_add(e.second, set(f.second_decay), square);
    const auto divisor = mul_add(hn::Sqrt(e.second), set(f.root_scale), set(f.epsilon));
    const auto decayed = kDecoupled ? hn::Mul(e.value, set(f.decay)) : e.value;
    e.value = mul_add(hn::Div(e.first, divisor), set(-f.step_size), decayed);
  });
}

void adam_range(const AdamFactors& factors, bool decoupled, const SpanRange& range) {
  decoupled ? update_range<true>(factors, range) : update_range<false>(factors, range);
}

}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::optim {
HWY_EXPORT(adam_range);

namespace {

class Adam final : public Optimizer {
 public:
  Adam(const Settings& settings, const Storage& storage, bool decoupled)
      : Optimizer(settings, storage), decoupled_(decoupled) {}

  std::vector<StateArray> state() const override {
    return {{"exp_avg", storage().state}, {"exp_avg_sq", storage().state, CodeMap::kUnsigned}};
  }
  void apply(Threads& threads, const Hyperparameters& hyperparameters, const Span& span) const override;

 private:
  AdamFactors factors(const Hyperparameters& hyperparameters) const;

  bool decoupled_;
};

AdamFactors Adam::factors(const Hyperparameters& h) const {
  const double beta1 = of(h).number("beta1"), beta2 = of(h).number("beta2");
  return {.gradient = gradient_rule(h),
          .decay = rounded(decoupled_ ? 1 - h.learning_rate * h.weight_decay : h.weight_decay),
          .first_decay = rounded(beta1),
          .first_rate = rounded(1 - beta1),
          .second_decay = rounded(beta2),
          .second_rate = rounded(1 - beta2),
          .step_size = rounded(h.learning_rate / (1 - power(beta1, h.step))),
          .root_scale = rounded(1 / std::sqrt(1 - power(beta2, h.step))),
          .epsilon = rounded(of(h).number("epsilon"))};
}

void Adam::apply(Threads& threads, const Hyperparameters& hyperparameters, const Span& span) const {
  const AdamFactors constants = factors(hyperparameters);
  for_each_range(threads, *this, hyperparameters, span, [&](const SpanRange& range) {
    HWY_DYNAMIC_DISPATCH(adam_range)(constants, decoupled_, range);
  });
}

}  // namespace

std::unique_ptr<Optimizer> make_adamw(const Settings& settings, const Storage& storage) {
  return std::make_unique<Adam>(settings, storage, true);
}
std::unique_ptr<Optimizer> make_adam(const Settings& settings, const Storage& storage) {
  return std::make_unique<Adam>(settings, storage, false);
}

}  // namespace sluice::optim
#endif  // HWY_ONCE
