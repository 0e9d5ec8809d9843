// Scales and clips the gradient before an optimizer sees it. Compiled once for each target: include it after
// hwy/foreach_target.h.
#if defined(SLUICE_OPTIM_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_OPTIM_GRADIENT_INL_H_
#undef SLUICE_OPTIM_GRADIENT_INL_H_
#else
#define SLUICE_OPTIM_GRADIENT_INL_H_
#endif

#include "kernels/simd-inl.h"
#include "optim/elementwise.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = kernels::HWY_NAMESPACE;

// Multiplies elements by the factor and clips them to the bound. A NaN stays NaN.
template <class D>
HWY_INLINE hn::Vec<D> ruled(D d, const GradientRule& rule, hn::Vec<D> gradient) {
  const auto value = hn::Mul(gradient, hn::Set(d, rule.factor));
  if (rule.bound == std::numeric_limits<float>::infinity()) return value;
  const auto high = hn::Set(d, rule.bound), low = hn::Set(d, -rule.bound);
  return hn::IfThenElse(hn::Gt(value, high), high, hn::IfThenElse(hn::Lt(value, low), low, value));
}
template <class D, class At>
HWY_INLINE hn::Vec<D> ruled(D d, const GradientRule& rule, ConstArray gradient, At at) {
  return ruled(d, rule, simd::load(d, gradient, at));
}

}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
