// The operations of arithmetic-inl.h on CPU vectors, and its functions compiled with them. Compiled once for
// each target: include it after hwy/foreach_target.h.
#if defined(SLUICE_OPTIM_VECTOR_OPS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_OPTIM_VECTOR_OPS_INL_H_
#undef SLUICE_OPTIM_VECTOR_OPS_INL_H_
#else
#define SLUICE_OPTIM_VECTOR_OPS_INL_H_
#endif

#include "kernels/simd-inl.h"
#include "optim/code_table.h"
#include "optim/factors.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = kernels::HWY_NAMESPACE;

template <class D>
struct VectorOps {
  using V = hn::Vec<D>;
  static HWY_INLINE V set(float value) { return hn::Set(D(), value); }
  static HWY_INLINE V mul(V a, V b) { return hn::Mul(a, b); }
  static HWY_INLINE V sub(V a, V b) { return hn::Sub(a, b); }
  static HWY_INLINE V div(V a, V b) { return hn::Div(a, b); }
  static HWY_INLINE V root(V a) { return hn::Sqrt(a); }
  static HWY_INLINE V mul_add(V a, V b, V c) { return simd::mul_add(a, b, c); }
  static HWY_INLINE V add(V a, V b) { return hn::Add(a, b); }
  static HWY_INLINE V min(V a, V b) { return hn::Min(a, b); }
  static HWY_INLINE V max(V a, V b) { return hn::Max(a, b); }
  static HWY_INLINE V abs(V a) { return hn::Abs(a); }
  // turn() flips the value's sign where the zero is negative; with_sign() gives the magnitude the sign of
  // `value`.
  static HWY_INLINE V turn(V value, float zero) { return hn::Xor(value, set(zero)); }
  static HWY_INLINE V with_sign(V magnitude, V value) {
    return hn::Or(magnitude, hn::And(value, set(-0.0f)));
  }
  static HWY_INLINE auto greater(V a, V b) { return hn::Gt(a, b); }
  template <class Mask>
  static HWY_INLINE V choose(Mask mask, V yes, V no) {
    return hn::IfThenElse(mask, yes, no);
  }
};

#define SLUICE_ARITHMETIC HWY_INLINE
#define SLUICE_UNROLL_LINES HWY_UNROLL(7)
#include "optim/arithmetic-inl.h"
#undef SLUICE_UNROLL_LINES
#undef SLUICE_ARITHMETIC

}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
