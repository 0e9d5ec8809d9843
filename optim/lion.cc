#include "core/error.h"
#include "kernels/simd.h"
#include "optim/elementwise.h"

#include "optim/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {

void lion_range(const LionFactors& factors, const SpanRange& range) {
  update_elements<1>(range, factors.gradient, [f = factors](auto, Elements& e) SLUICE_BODY {
    update_lion<VectorOps<simd::F32>>(f, e);
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
    const LionFactors constants = factors(h);
    for_each_range(threads, *this, h, span, [&](const SpanRange& range) {
      HWY_DYNAMIC_DISPATCH(lion_range)(constants, range);
    });
  }
  std::optional<ElementwiseUpdate> elementwise(const Hyperparameters& h) const override {
    return ElementwiseUpdate{"lion", factors(h)};
  }

 private:
  LionFactors factors(const Hyperparameters& h) const {
    const double beta1 = of(h).number("beta1"), beta2 = of(h).number("beta2");
    return {.gradient = gradient_rule(h),
            .decay = rounded(1 - h.learning_rate * h.weight_decay),
            .step_size = rounded(h.learning_rate),
            .of_average = rounded(beta1),
            .blend = rounded(1 - beta1),
            .keep = rounded(beta2),
            .rate = rounded(1 - beta2)};
  }
};

}  // namespace

std::unique_ptr<Optimizer> make_lion(const Settings& settings, const Storage& storage) {
  return std::make_unique<Lion>(settings, storage);
}

}  // namespace sluice::optim
#endif  // HWY_ONCE
