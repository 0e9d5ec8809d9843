// Encodes and decodes vectors: see optim/eight_bit.h. Compiled once for each target: include it after
// hwy/foreach_target.h.
#if defined(SLUICE_OPTIM_EIGHT_BIT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_OPTIM_EIGHT_BIT_INL_H_
#undef SLUICE_OPTIM_EIGHT_BIT_INL_H_
#else
#define SLUICE_OPTIM_EIGHT_BIT_INL_H_
#endif

#include <bit>
#include <cmath>
#include <cstring>

#include "optim/vector_ops-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {
namespace codes {

using simd::F32, simd::F32Vector;
using I32 = hn::Rebind<std::int32_t, F32>;
using U32 = hn::Rebind<std::uint32_t, F32>;
using U8 = hn::Rebind<std::uint8_t, F32>;
using I8 = hn::Rebind<std::int8_t, F32>;

HWY_INLINE hn::Vec<U8> load_bytes(const std::uint8_t* from, simd::Whole at) {
  return hn::LoadU(U8(), from + at.begin);
}
HWY_INLINE hn::Vec<U8> load_bytes(const std::uint8_t* from, simd::Part at) {
  HWY_ALIGN std::uint8_t lanes[simd::kLanes] = {};
  std::memcpy(lanes, from + at.begin, at.count);
  return load_bytes(lanes, simd::Whole{0});
}
HWY_INLINE void store_bytes(hn::Vec<U8> bytes, std::uint8_t* to, simd::Whole at) {
  hn::StoreU(bytes, U8(), to + at.begin);
}
HWY_INLINE void store_bytes(hn::Vec<U8> bytes, std::uint8_t* to, simd::Part at) {
  HWY_ALIGN std::uint8_t lanes[simd::kLanes];
  store_bytes(bytes, lanes, simd::Whole{0});
  std::memcpy(to + at.begin, lanes, at.count);
}

template <CodeMap kMap>
inline const CodeTable& kTable = code_table(kMap);

template <CodeMap kMap>
class Decoder {
 public:
  HWY_INLINE explicit Decoder(float scale) : scale_(scale) {}

  template <class At>
  HWY_INLINE F32Vector decoded(const std::uint8_t* codes, At at) const {
    return hn::Mul(magnitude(load_bytes(codes, at)), simd::set(scale_));
  }

 private:
  static constexpr bool kHasSign = kMap == CodeMap::kSigned;

  static HWY_INLINE F32Vector number(hn::Vec<U8> bytes) {
    if constexpr (kHasSign) return hn::ConvertTo(F32(), hn::PromoteTo(I32(), hn::BitCast(I8(), bytes)));
    return hn::Add(hn::ConvertTo(F32(), hn::PromoteTo(I32(), bytes)), simd::set(1));
  }

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  static HWY_INLINE F32Vector magnitude(hn::Vec<U8> bytes) {
    const CodeTable& table = kTable<kMap>;
    const auto n = number(bytes);
    const auto exponent = hn::And(hn::ShiftRight<23>(hn::BitCast(U32(), n)), hn::Set(U32(), 7));
    const auto line = hn::IndicesFromVec(F32(), exponent);
    const auto slope = hn::TableLookupLanes(hn::Load(F32(), table.slopes.data()), line);
    const auto offset = hn::TableLookupLanes(hn::Load(F32(), table.offsets.data()), line);
    if constexpr (!kHasSign) return simd::mul_add(n, slope, offset);
    const auto mirrored = hn::Xor(offset, hn::And(n, simd::set(-0.0f)));
    return hn::IfThenElseZero(hn::Ne(n, simd::set(0)), simd::mul_add(n, slope, mirrored));
  }
#else
  static HWY_INLINE F32Vector magnitude(hn::Vec<U8> bytes) {
    return hn::GatherIndex(F32(), kTable<kMap>.values.data(), hn::PromoteTo(I32(), bytes));
  }
#endif
  float scale_;
};

// Finds the value with the largest magnitude in a block.
class Largest {
 public:
  HWY_INLINE Largest() : greatest_(simd::set(0)), magnitude_(hn::Zero(I32())) {}
  HWY_INLINE void look_at(F32Vector value) {
    greatest_ = hn::Max(greatest_, value);
    magnitude_ = hn::Max(magnitude_, hn::BitCast(I32(), hn::Abs(value)));
  }
  HWY_INLINE float scale() const {
    const auto most = std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(I32(), magnitude_)));
    return scale_of_block(most, hn::GetLane(hn::MaxOfLanes(F32(), greatest_)));
  }

 private:
  F32Vector greatest_;
  hn::Vec<I32> magnitude_;
};

// Encodes the n <= kScaleBlock values of one block, for which `scale` was computed.
template <CodeMap kMap>
HWY_INLINE void encode_block(std::size_t n, const float* values, float scale, std::uint8_t* codes) {
  if (scale == 0 || !std::isfinite(scale)) {
    constexpr int kOne = kMap == CodeMap::kSigned ? 128 : 255;
    std::memset(codes, scale == 0 ? 0 : kOne, n);
    return;
  }
  const CodeTable& table = kTable<kMap>;
  const float inverse = 1 / std::abs(scale);
  float slopes[CodeTable::kLines], offsets[CodeTable::kLines];
  for (std::size_t i = 0; i < CodeTable::kLines; ++i) {
    slopes[i] = table.inverse_slopes[i] * inverse;
    offsets[i] = table.inverse_offsets[i];
  }
  const float zero = std::copysign(0.0f, scale);
  simd::for_each_vector(n, [&](auto at) SLUICE_BODY {
    const auto number = code_number<kMap, VectorOps<F32>>(simd::load(values, at), slopes, offsets, zero);
    // Adding 1.5 * 2^23 rounds to an integer, since f32 values from 2^23 on are integers; its lowest bits are
    // the code.
    const auto whole = hn::Add(number, simd::set(0x1.8p23f));
    store_bytes(hn::TruncateTo(U8(), hn::BitCast(U32(), whole)), codes, at);
  });
}

}  // namespace codes
}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
