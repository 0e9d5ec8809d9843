// Vectors of the attention kernels: rows of 16 f32, exp and log, tiles packed and transposed, dropout.
// Compiled once for each target: include it after hwy/foreach_target.h.
#if defined(SLUICE_ATTENTION_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_ATTENTION_SIMD_INL_H_
#undef SLUICE_ATTENTION_SIMD_INL_H_
#else
#define SLUICE_ATTENTION_SIMD_INL_H_
#endif

#include <hwy/highway.h>

#include <cmath>
#include <cstring>

#include "core/random.h"
#include "kernels/attention_common.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::CappedTag<float, kPanel>;
using FloatVector = hn::Vec<Floats>;
inline constexpr std::size_t kFloatLanes = hn::MaxLanes(Floats());
inline constexpr std::size_t kRowVectors = kPanel / kFloatLanes;

// a * b + c, rounded once on every target.
HWY_INLINE FloatVector fused(FloatVector a, FloatVector b, FloatVector c) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  const Floats d;
  float x[kFloatLanes], y[kFloatLanes], z[kFloatLanes];
  hn::StoreU(a, d, x);
  hn::StoreU(b, d, y);
  hn::StoreU(c, d, z);
  for (std::size_t i = 0; i < kFloatLanes; ++i) z[i] = std::fma(x[i], y[i], z[i]);
  return hn::LoadU(d, z);
#else
  return hn::MulAdd(a, b, c);
#endif
}

HWY_INLINE FloatVector splat(float value) { return hn::Set(Floats(), value); }

// body(lane) for the first lane of every vector of a row.
template <class Body>
HWY_INLINE void for_row(const Body& body) {
  HWY_UNROLL(4)
  for (std::size_t v = 0; v < kRowVectors; ++v) body(v * kFloatLanes);
}

// e^x for x up to 88; 0 where that is below the smallest normal number, so also for -infinity. Within 1.5
// units of the last place; NaN stays NaN.
HWY_INLINE FloatVector exp_of(FloatVector x) {
  const hn::Rebind<std::int32_t, Floats> integers;
  const auto rounding =
      splat(12582912.0f);  // 1.5 * 2^23: the sum's last bits are the integer that is nearest
  const auto shifted = fused(x, splat(1.44269504f), rounding);
  const auto k = hn::Sub(shifted, rounding);
  auto r = fused(k, splat(-0x1.62e43p-1f), x);
  r = fused(k, splat(0x1.05c61p-29f), r);
  auto tail = fused(r, splat(kExpTail[4]), splat(kExpTail[3]));
  tail = fused(r, tail, splat(kExpTail[2]));
  tail = fused(r, tail, splat(kExpTail[1]));
  tail = fused(r, tail, splat(kExpTail[0]));
  const auto mantissa = hn::Add(fused(hn::Mul(r, r), tail, r), splat(1.0f));
  const auto power = hn::ShiftLeft<23>(hn::Add(hn::BitCast(integers, shifted), hn::Set(integers, 127)));
  const auto result = hn::Mul(mantissa, hn::BitCast(Floats(), power));
  return hn::IfThenZeroElse(hn::Lt(x, splat(-87.3f)), result);
}

// ln x for normal, positive, finite x.
HWY_INLINE FloatVector log_of(FloatVector x) {
  const hn::Rebind<std::int32_t, Floats> integers;
  const auto root_half = hn::Set(integers, 0x3F3504F3);
  const auto exponent = hn::ShiftRight<23>(hn::Sub(hn::BitCast(integers, x), root_half));
  const auto mantissa = hn::BitCast(Floats(), hn::Sub(hn::BitCast(integers, x), hn::ShiftLeft<23>(exponent)));
  // ln m = 2 artanh(s) with s = (m - 1) / (m + 1), |s| < 0.172.
  const auto s = hn::Div(hn::Sub(mantissa, splat(1.0f)), hn::Add(mantissa, splat(1.0f)));
  const auto square = hn::Mul(s, s);
  auto tail = fused(square, splat(2.0f / 9), splat(2.0f / 7));
  tail = fused(square, tail, splat(2.0f / 5));
  tail = fused(square, tail, splat(2.0f / 3));
  const auto e = hn::ConvertTo(Floats(), exponent);
  const auto low = fused(hn::Mul(square, s), tail, hn::Mul(e, splat(-0x1.05c61p-29f)));
  return fused(e, splat(0x1.62e43p-1f), fused(s, splat(2.0f), low));
}

// --- packing
// -----------------------------------------------------------------------------------------------------

HWY_INLINE FloatVector load_as_f32(const float* from) { return hn::LoadU(Floats(), from); }
HWY_INLINE FloatVector load_as_f32(const Bf16* from) {
  const hn::Rebind<std::uint32_t, Floats> wide;
  const hn::Rebind<std::uint16_t, Floats> narrow;
  const auto bits = hn::LoadU(narrow, reinterpret_cast<const std::uint16_t*>(from));
  return hn::BitCast(Floats(), hn::ShiftLeft<16>(hn::PromoteTo(wide, bits)));
}
HWY_INLINE float one_as_f32(float value) { return value; }
HWY_INLINE float one_as_f32(Bf16 value) { return to_f32(value); }

HWY_INLINE void store_from_f32(FloatVector value, float* to) { hn::StoreU(value, Floats(), to); }
HWY_INLINE void store_from_f32(FloatVector value, Bf16* to) {  // as to_bf16
  const hn::Rebind<std::uint32_t, Floats> wide;
  const hn::Rebind<std::int32_t, Floats> integers;
  const hn::Rebind<std::uint16_t, Floats> narrow;
  const auto bits = hn::BitCast(wide, value);
  const auto upper = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(upper, hn::Set(wide, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(wide, 0x7fff))));
  const auto quiet = hn::Or(upper, hn::Set(wide, 0x40));
  const auto result = hn::IfThenElse(hn::RebindMask(wide, hn::IsNaN(value)), quiet, rounded);
  hn::StoreU(hn::DemoteTo(narrow, hn::BitCast(integers, result)), narrow,
             reinterpret_cast<std::uint16_t*>(to));
}
HWY_INLINE void store_one(float value, float* to) { *to = value; }
HWY_INLINE void store_one(float value, Bf16* to) { *to = to_bf16(value); }

template <class T>
HWY_INLINE void pack_row(const T* from, std::size_t width, float factor, float* to, std::size_t to_width) {
  const FloatVector factors = splat(factor);
  std::size_t c = 0;
  for (; c + kFloatLanes <= width; c += kFloatLanes)
    hn::StoreU(hn::Mul(load_as_f32(from + c), factors), Floats(), to + c);
  for (; c < width; ++c) to[c] = one_as_f32(from[c]) * factor;
  for (; c < to_width; ++c) to[c] = 0;
}

template <class T>
HWY_INLINE void unpack_row(const float* from, std::size_t width, float factor, T* to) {
  const FloatVector factors = splat(factor);
  std::size_t c = 0;
  for (; c + kFloatLanes <= width; c += kFloatLanes)
    store_from_f32(hn::Mul(hn::LoadU(Floats(), from + c), factors), to + c);
  for (; c < width; ++c) store_one(from[c] * factor, to + c);
}

// Rows of `width` elements, `stride` apart, become rows of f32 times `factor`, zero up to the packed stride.
HWY_INLINE void pack_tile(ConstArray from, std::size_t stride, std::size_t rows, std::size_t width,
                          float factor, float* to) {
  const std::size_t to_stride = packed_stride(width);
  for (std::size_t i = 0; i < rows; ++i) {
    if (from.type == Dtype::kF32)
      pack_row(from.f32() + i * stride, width, factor, to + i * to_stride, to_stride);
    else
      pack_row(from.bf16() + i * stride, width, factor, to + i * to_stride, to_stride);
  }
}

HWY_INLINE void unpack_tile(const float* from, std::size_t rows, std::size_t width, float factor, Array to,
                            std::size_t stride) {
  const std::size_t from_stride = packed_stride(width);
  for (std::size_t i = 0; i < rows; ++i) {
    if (to.type == Dtype::kF32)
      unpack_row(from + i * from_stride, width, factor, to.f32() + i * stride);
    else
      unpack_row(from + i * from_stride, width, factor, to.bf16() + i * stride);
  }
}

HWY_INLINE void transpose_4x4(const float* from, std::size_t from_stride, float* to, std::size_t to_stride) {
#if HWY_TARGET == HWY_SCALAR
  for (std::size_t r = 0; r < 4; ++r)
    for (std::size_t c = 0; c < 4; ++c) to[c * to_stride + r] = from[r * from_stride + c];
#else
  const hn::FixedTag<float, 4> d;
  const auto a = hn::LoadU(d, from), b = hn::LoadU(d, from + from_stride);
  const auto c = hn::LoadU(d, from + 2 * from_stride), e = hn::LoadU(d, from + 3 * from_stride);
  const auto ab_low = hn::InterleaveLower(d, a, b), ab_high = hn::InterleaveUpper(d, a, b);
  const auto ce_low = hn::InterleaveLower(d, c, e), ce_high = hn::InterleaveUpper(d, c, e);
  hn::StoreU(hn::ConcatLowerLower(d, ce_low, ab_low), d, to);
  hn::StoreU(hn::ConcatUpperUpper(d, ce_low, ab_low), d, to + to_stride);
  hn::StoreU(hn::ConcatLowerLower(d, ce_high, ab_high), d, to + 2 * to_stride);
  hn::StoreU(hn::ConcatUpperUpper(d, ce_high, ab_high), d, to + 3 * to_stride);
#endif
}

// rows and columns: multiples of 4.
HWY_INLINE void transpose(const float* from, std::size_t rows, std::size_t columns, std::size_t from_stride,
                          float* to, std::size_t to_stride) {
  for (std::size_t c = 0; c < columns; c += 4)
    for (std::size_t r = 0; r < rows; r += 4)
      transpose_4x4(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
}

// --- dropout
// -----------------------------------------------------------------------------------------------------

using Wide = hn::CappedTag<std::uint64_t, 8>;
using WideVector = hn::Vec<Wide>;

#if HWY_TARGET == HWY_SCALAR
HWY_INLINE void random_words(const AttentionShape& s, std::uint64_t block, std::uint32_t* words) {
  const auto made = CounterRandom(s.seed, s.stream).block(block);
  std::memcpy(words, made.data(), sizeof made);
}
#else
HWY_INLINE WideVector multiply_low_halves(WideVector a, std::uint32_t b) {
  const hn::Repartition<std::uint32_t, Wide> halves;
  return hn::MulEven(hn::BitCast(halves, a), hn::BitCast(halves, hn::Set(Wide(), b)));
}

// Words 4 * block .. of CounterRandom(seed, stream), one block a lane, in order. The multiplications read
// only the lower halves of the lanes, so the upper ones may hold anything until the end.
HWY_INLINE void random_words(const AttentionShape& s, std::uint64_t block, std::uint32_t* words) {
  auto c0 = hn::Add(hn::Set(Wide(), block), hn::Iota(Wide(), 0)), c1 = hn::ShiftRight<32>(c0);
  auto c2 = hn::Set(Wide(), s.stream), c3 = hn::ShiftRight<32>(c2);
  auto key0 = static_cast<std::uint32_t>(s.seed), key1 = static_cast<std::uint32_t>(s.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const auto a = multiply_low_halves(c0, 0xD2511F53u), b = multiply_low_halves(c2, 0xCD9E8D57u);
    c0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(b), c1), hn::Set(Wide(), key0));
    c2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(a), c3), hn::Set(Wide(), key1));
    c1 = b;
    c3 = a;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const auto lower = hn::Set(Wide(), 0xFFFFFFFFu);
  HWY_ALIGN std::uint64_t pairs[2 * hn::MaxLanes(Wide())];
  hn::StoreInterleaved2(hn::Or(hn::And(c0, lower), hn::ShiftLeft<32>(c1)),
                        hn::Or(hn::And(c2, lower), hn::ShiftLeft<32>(c3)), Wide(), pairs);
  std::memcpy(words, pairs, sizeof pairs);
}
#endif

// What dropout multiplies one query's probabilities by, for kTile keys from word `index` on: 0 or 1 / (1 -
// p).
HWY_INLINE void dropout_row(const AttentionShape& s, std::uint64_t index, float* factors) {
  constexpr std::size_t kBlocks = hn::MaxLanes(Wide());
  HWY_ALIGN std::uint32_t words[kTile + 4 + 4 * kBlocks];
  const std::size_t skip = index % 4;
  for (std::size_t i = 0; 4 * i < skip + kTile; i += kBlocks) random_words(s, index / 4 + i, words + 4 * i);
  const hn::Rebind<std::uint32_t, Floats> unsigned_lanes;
  const hn::Rebind<std::int32_t, Floats> integers;
  const float keep = 1.0f - s.dropout;
  for (std::size_t j = 0; j < kTile; j += kFloatLanes) {
    const auto bits = hn::ShiftRight<8>(hn::LoadU(unsigned_lanes, words + skip + j));
    const auto unit = hn::Mul(hn::ConvertTo(Floats(), hn::BitCast(integers, bits)), splat(0x1.0p-24f));
    hn::StoreU(hn::IfThenElseZero(hn::Lt(unit, splat(keep)), splat(1.0f / keep)), Floats(), factors + j);
  }
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
