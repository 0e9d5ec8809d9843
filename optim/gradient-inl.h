// Scales and clips the gradient before an optimizer sees it. Compiled once for each target: include it after
// hwy/foreach_target.h.
#if defined(SLUICE_OPTIM_GRADIENT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_OPTIM_GRADIENT_INL_H_
#undef SLUICE_OPTIM_GRADIENT_INL_H_
#else
#define SLUICE_OPTIM_GRADIENT_INL_H_
#endif

#include "optim/elementwise.h"
#include "optim/vector_ops-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {
template <class D>
HWY_INLINE hn::Vec<D> ruled(D, const GradientRule& rule, hn::Vec<D> gradient) {
  return ruled<VectorOps<D>>(rule, gradient);
}
template <class D, class At>
HWY_INLINE hn::Vec<D> ruled(D d, const GradientRule& rule, ConstArray gradient, At at) {
  return ruled(d, rule, simd::load(d, gradient, at));
}

}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
