// exp, log, sine and cosine with the same bits on every target: polynomials fitted at Chebyshev points,
// evaluated with fused multiply-adds in one order. Compiled once for each target: include it after
// hwy/foreach_target.h.
#if defined(SLUICE_KERNELS_SIMD_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_KERNELS_SIMD_MATH_INL_H_
#undef SLUICE_KERNELS_SIMD_MATH_INL_H_
#else
#define SLUICE_KERNELS_SIMD_MATH_INL_H_
#endif

#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

// Evaluates c0 + x * (c1 + x * (...)).
template <class V>
HWY_INLINE V polynomial(V, hn::TFromV<V> last) {
  return hn::Set(hn::DFromV<V>(), last);
}
template <class V, class... More>
HWY_INLINE V polynomial(V x, hn::TFromV<V> first, More... more) {
  return mul_add(x, polynomial(x, more...), hn::Set(hn::DFromV<V>(), first));
}

// Keeps NaN, since comparisons with NaN are false.
HWY_INLINE F32Vector clamp(F32Vector x, float low, float high) {
  const auto raised = hn::IfThenElse(hn::Lt(x, set(low)), set(low), x);
  return hn::IfThenElse(hn::Gt(raised, set(high)), set(high), raised);
}

// kRoundF32 is 1.5 * 2^23: adding it rounds a small number to an integer, which is then in the lowest bits.
inline constexpr float kRoundF32 = 12582912.0f;
inline constexpr double kRoundF64 = 6755399441055744.0;

HWY_INLINE F32Vector two_to(hn::Vec<hn::Rebind<std::int32_t, F32>> exponent) {
  const hn::Rebind<std::int32_t, F32> i32;
  return hn::BitCast(F32(), hn::ShiftLeft<23>(hn::Add(exponent, hn::Set(i32, 127))));
}

// e^x = mantissa * 2^(shifted - kShift), for |x| up to 128.
inline constexpr std::int32_t kShift = 0x4B400000;  // the bits of kRoundF32
struct ScaledExp {
  F32Vector mantissa;
  hn::Vec<hn::Rebind<std::int32_t, F32>> shifted;
};
HWY_INLINE ScaledExp scaled_exp(F32Vector x) {
  const hn::Rebind<std::int32_t, F32> i32;
  const auto shifted = mul_add(x, set(0x1.715476p+0f), set(kRoundF32));
  const auto k = hn::Sub(shifted, set(kRoundF32));
  auto r = mul_add(k, set(-0x1.62e43p-1f), x);
  r = mul_add(k, set(0x1.05c61p-29f), r);
  const auto tail = polynomial(r, 0.5000000014291086f, 0.16666573358081624f, 0.041666456777923466f,
                               0.008363776466632082f, 0.0013934544520060987f);
  return {hn::Add(mul_add(hn::Mul(r, r), tail, r), set(1.0f)), hn::BitCast(i32, shifted)};
}

// Computes e^x within 2 units in the last place. The result is infinity above 88.73, and zero below -104.
HWY_INLINE F32Vector exp(F32Vector x) {
  const hn::Rebind<std::int32_t, F32> i32;
  const ScaledExp e = scaled_exp(clamp(x, -106.0f, 90.0f));
  // 2^k is applied as two factors, since it may overflow or underflow where the result does not.
  const auto exponent = hn::Sub(e.shifted, hn::Set(i32, kShift));
  const auto half = hn::ShiftRight<1>(exponent);
  return hn::Mul(hn::Mul(e.mantissa, two_to(half)), two_to(hn::Sub(exponent, half)));
}

// Computes e^x for x up to 88 with fewer instructions. Results below the smallest normal number become zero,
// as does that of -infinity. (two_to() shifts the bits of kShift out.)
HWY_INLINE F32Vector exp_to_normal(F32Vector x) {
  const ScaledExp e = scaled_exp(x);
  return hn::IfThenZeroElse(hn::Lt(x, set(-87.3f)), hn::Mul(e.mantissa, two_to(e.shifted)));
}

// Computes ln x for normal, positive, finite x.
HWY_INLINE F32Vector log(F32Vector x) {
  const hn::Rebind<std::int32_t, F32> i32;
  const auto root_half = hn::Set(i32, 0x3F3504F3);
  const auto exponent = hn::ShiftRight<23>(hn::Sub(hn::BitCast(i32, x), root_half));
  const auto mantissa = hn::BitCast(F32(), hn::Sub(hn::BitCast(i32, x), hn::ShiftLeft<23>(exponent)));
  const auto f = hn::Sub(mantissa, set(1.0f));
  const auto e = hn::ConvertTo(F32(), exponent);
  const auto tail =
      polynomial(f, 0.33333328596775774f, -0.25000296546039846f, 0.20001468576920378f, -0.1664224759590261f,
                 0.14202173822190534f, -0.1297223898899432f, 0.1271230767771329f, -0.08101558333173675f);
  const auto square = hn::Mul(f, f);
  auto low = mul_add(hn::Mul(square, f), tail, hn::Mul(e, set(-0x1.05c61p-29f)));
  low = mul_add(square, set(-0.5f), low);
  return mul_add(e, set(0x1.62e43p-1f), hn::Add(f, low));
}

// sigmoid(x) and sigmoid(-x), each to full relative precision.
struct Sigmoid {
  F32Vector positive, negative;
};
HWY_INLINE Sigmoid sigmoid(F32Vector x) {
  const auto e = exp(hn::Neg(hn::Abs(x)));
  const auto larger = hn::Div(set(1.0f), hn::Add(set(1.0f), e));
  const auto smaller = hn::Mul(e, larger);
  const auto below = hn::Lt(x, set(0.0f));
  return {hn::IfThenElse(below, smaller, larger), hn::IfThenElse(below, larger, smaller)};
}

template <class V>
struct SineCosine {
  V sine, cosine;
};

// Returns the sine and cosine of r plus q quarter turns, from those of r. Only the two lowest bits of q
// count.
template <class V, class Q>
HWY_INLINE SineCosine<V> in_quarter(V sine, V cosine, Q q) {
  const hn::DFromV<V> d;
  const hn::DFromV<Q> di;
  const auto bit0 = hn::And(q, hn::Set(di, 1));
  const auto swap = hn::RebindMask(d, hn::Eq(bit0, hn::Set(di, 1)));
  const auto s = hn::IfThenElse(swap, cosine, sine);
  const auto c = hn::IfThenElse(swap, sine, cosine);
  constexpr int kSign = sizeof(hn::TFromV<V>) * 8 - 2;  // moves bit 1 to the sign
  const auto sine_sign = hn::ShiftLeft<kSign>(hn::And(q, hn::Set(di, 2)));
  const auto cosine_sign = hn::ShiftLeft<kSign>(hn::And(hn::Add(q, hn::Set(di, 1)), hn::Set(di, 2)));
  return {hn::Xor(s, hn::BitCast(d, sine_sign)), hn::Xor(c, hn::BitCast(d, cosine_sign))};
}

// Returns the sine and cosine of 2 pi * turn, for 0 <= turn < 1.
HWY_INLINE SineCosine<F32Vector> sine_cosine_of_turn(F32Vector turn) {
  const hn::Rebind<std::int32_t, F32> i32;
  const auto quarters = hn::Mul(turn, set(4.0f));
  const auto shifted = hn::Add(quarters, set(kRoundF32));
  const auto t = hn::Sub(quarters, hn::Sub(shifted, set(kRoundF32)));
  const auto square = hn::Mul(t, t);
  const auto sine =
      hn::Mul(t, polynomial(square, 1.5707963267881073f, -0.6459640961476634f, 0.0796925827430151f,
                            -0.0046812663681563785f, 0.00015820652673344208f));
  const auto cosine = polynomial(square, 1.0f, -1.2337005501352802f, 0.2536695077229466f,
                                 -0.02086347506088753f, 0.0009191963473012947f, -2.490925488259124e-05f);
  return in_quarter(sine, cosine, hn::BitCast(i32, shifted));
}

// Returns the sine and cosine of an angle below 2^31, in f64. The error is a few 1e-16, plus 1e-32 of the
// angle from the range reduction.
template <class V>
HWY_INLINE SineCosine<V> sine_cosine_of_angle(V angle) {
  const hn::DFromV<V> d;
  const hn::Rebind<std::int64_t, hn::DFromV<V>> i64;
  const auto shifted = mul_add(angle, hn::Set(d, 0x1.45f306dc9c883p-1), hn::Set(d, kRoundF64));
  const auto k = hn::Neg(hn::Sub(shifted, hn::Set(d, kRoundF64)));
  auto r = mul_add(k, hn::Set(d, 0x1.921fb54442d18p+0), angle);
  r = mul_add(k, hn::Set(d, 0x1.1a62633145c07p-54), r);
  const auto square = hn::Mul(r, r);
  const auto sine =
      hn::Mul(r, polynomial(square, 1.0, -0.1666666666666667, 0.008333333333330126, -0.00019841269835647407,
                            2.75573155631662e-06, -2.505102442395696e-08, 1.5910643231273384e-10));
  const auto cosine =
      polynomial(square, 1.0, -0.5, 0.04166666666666888, -0.0013888888889387262, 2.4801587692390346e-05,
                 -2.7557454119580864e-07, 2.0897741812102177e-09, -1.2646670429614211e-11);
  return in_quarter(sine, cosine, hn::BitCast(i64, shifted));
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
