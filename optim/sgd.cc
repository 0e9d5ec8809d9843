#include "core/error.h"
#include "kernels/simd.h"
#include "optim/elementwise.h"

#include "optim/update-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {

template <bool kMomentum>
HWY_INLINE void update_range(const SgdFactors& factors, const SpanRange& range) {
  update_elements<kMomentum ? 1 : 0>(range, factors.gradient, [f = factors](auto, Elements& e) SLUICE_BODY {
    update_sgd<kMomentum, VectorOps<simd::F32>>(f, e);
  });
}

void sgd_range(const SgdFactors& factors, bool with_momentum, const SpanRange& range) {
  with_momentum ? update_range<true>(factors, range) : update_range<false>(factors, range);
}

}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::optim {
HWY_EXPORT(sgd_range);

namespace {

class Sgd final : public Optimizer {
 public:
  using Optimizer::Optimizer;

  std::vector<StateArray> state() const override {
    if (!has_momentum()) return {};
    return {{"momentum_buffer", storage().state}};
  }
  void apply(Threads& threads, const Hyperparameters& h, const Span& span) const override {
    const SgdFactors constants = factors(h);
    const bool with_momentum = has_momentum();
    for_each_range(threads, *this, h, span, [&](const SpanRange& range) {
      HWY_DYNAMIC_DISPATCH(sgd_range)(constants, with_momentum, range);
    });
  }
  std::optional<ElementwiseUpdate> elementwise(const Hyperparameters& h) const override {
    return ElementwiseUpdate{has_momentum() ? "sgd" : "sgd_stateless", factors(h)};
  }

 private:
  SgdFactors factors(const Hyperparameters& h) const {
    return {.gradient = gradient_rule(h),
            .decay = rounded(h.weight_decay),
            .learning_rate = rounded(h.learning_rate),
            .momentum = rounded(of(h).number("momentum")),
            .nesterov = own().is_on("nesterov")};
  }
  bool has_momentum() const { return own().number("momentum") != 0; }
};

}  // namespace

std::unique_ptr<Optimizer> make_sgd(const Settings& settings, const Storage& storage) {
  if (settings.is_on("nesterov") && settings.number("momentum") == 0)
    fail(ErrorCode::kInvalidArgument,
         "sgd: nesterov was asked for without momentum; give a momentum above 0");
  return std::make_unique<Sgd>(settings, storage);
}

}  // namespace sluice::optim
#endif  // HWY_ONCE
