#include <cmath>

#include "kernels/simd.h"
#include "optim/elementwise.h"

#include "optim/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {

void adam_range(const AdamFactors& factors, const SpanRange& range) {
  update_elements<2>(range, factors.gradient, [f = factors](auto, Elements& e) SLUICE_BODY {
    update_adam<VectorOps<simd::F32>>(f, e);
  });
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
  std::optional<ElementwiseUpdate> elementwise(const Hyperparameters& h) const override {
    return ElementwiseUpdate{"adam", factors(h)};
  }

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
          .epsilon = rounded(of(h).number("epsilon")),
          .decoupled = decoupled_};
}

void Adam::apply(Threads& threads, const Hyperparameters& hyperparameters, const Span& span) const {
  const AdamFactors constants = factors(hyperparameters);
  for_each_range(threads, *this, hyperparameters, span, [&](const SpanRange& range) {
    HWY_DYNAMIC_DISPATCH(adam_range)(constants, range);
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
