#include "core/error.h"
#include "kernels/simd.h"
#include "optim/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/lion.cc"
#include <hwy/foreach_target.h>

#include "optim/update-inl.h"

#ifndef SLUICE_OPTIM_LION_TYPES
#define SLUICE_OPTIM_LION_TYPES
namespace sluice::optim {

// The constants of a step, computed in f64 and rounded once.
struct LionFactors {
  GradientRule gradient;
  float decay;              // 1 - lr * weight_decay
  float step_size;          // lr
  float of_average, blend;  // beta1, 1 - beta1: shares of average and gradient in the update's direction
  float keep, rate;         // beta2, 1 - beta2: their shares in the next average
};

}  // namespace sluice::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {

void lion_range(const LionFactors& factors, const SpanRange& range) {
  update_elements<1>(range, factors.gradient, [f = factors](auto, Elements& e) SLUICE_BODY {
    using simd::mul_add, simd::set;
    const auto zero = set(0.0f);
    const auto direction = mul_add(e.first, set(f.of_average), hn::Mul(e.gradient, set(f.blend)));
    const auto up = hn::IfThenElse(hn::Gt(direction, zero), set(f.step_size), zero);
    const auto step = hn::IfThenElse(hn::Lt(direction, zero), set(-f.step_size), up);
    e.value = hn::Sub(hn::Mul(e.value, set(f.decay)), step);
    e.first = mul_add(e.first, set(f.keep), hn::Mul(e.gradient, set(f.rate)));
  });
}

}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::optim {
HWY_EXPORT(lion_range);

namespace {

class Lion final : public Optimizer {
 public:
  using Optimizer::Optimizer;

  std::vector<StateArray> state() const override { return {{"exp_avg", storage().state}}; }
  void apply(Threads& threads, const Hyperparameters& h, const Span& span) const override {
    const double beta1 = of(h).number("beta1"), beta2 = of(h).number("beta2");
    const LionFactors factors = {.gradient = gradient_rule(h),
                                 .decay = rounded(1 - h.learning_rate * h.weight_decay),
                                 .step_size = rounded(h.learning_rate),
                                 .of_average = rounded(beta1),
                                 .blend = rounded(1 - beta1),
                                 .keep = rounded(beta2),
                                 .rate = rounded(1 - beta2)};
    for_each_range(threads, *this, h, span, [&](const SpanRange& range) {
      HWY_DYNAMIC_DISPATCH(lion_range)(factors, range);
    });
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_lion(const Settings& settings, const Storage& storage) {
  return std::make_unique<Lion>(settings, storage);
}

}  // namespace sluice::optim
#endif  // HWY_ONCE
