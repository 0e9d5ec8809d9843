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
#include <limits>

#include "kernels/simd-inl.h"
#include "optim/code_table.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = kernels::HWY_NAMESPACE;
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

// Decodes the codes of one block.
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

// Finds the value of the largest magnitude in a block.
class Largest {
 public:
  HWY_INLINE Largest() : greatest_(simd::set(0)), magnitude_(hn::Zero(I32())) {}
  HWY_INLINE void look_at(F32Vector value) {
    greatest_ = hn::Max(greatest_, value);
    magnitude_ = hn::Max(magnitude_, hn::BitCast(I32(), hn::Abs(value)));
  }
  // Returns that value, with its sign (positive where both signs occur) and at least kLeastScale in
  // magnitude. It is not finite where any value of the block is not.
  HWY_INLINE float scale() const {
    const auto most = std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(I32(), magnitude_)));
    if (most == 0) return 0;
    if (most < kLeastScale) return kLeastScale;
    if (!std::isfinite(most)) return std::isnan(most) ? std::numeric_limits<float>::quiet_NaN() : most;
    return hn::GetLane(hn::MaxOfLanes(F32(), greatest_)) == most ? most : -most;
  }

 private:
  F32Vector greatest_;
  hn::Vec<I32> magnitude_;
};

// Encodes the n <= kScaleBlock values of one block, from which the scale was taken.
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
  const auto least_line = [&](F32Vector x) SLUICE_BODY {
    auto least = simd::mul_add(x, simd::set(slopes[0]), simd::set(offsets[0]));
    HWY_UNROLL(7)
    for (std::size_t i = 1; i < CodeTable::kLines; ++i)
      least = hn::Min(least, simd::mul_add(x, simd::set(slopes[i]), simd::set(offsets[i])));
    return least;
  };
  const auto flip = simd::set(std::copysign(0.0f, scale)), sign = simd::set(-0.0f);
  simd::for_each_vector(n, [&](auto at) SLUICE_BODY {
    const auto value = simd::load(values, at);
    F32Vector number;
    if constexpr (kMap == CodeMap::kSigned) {
      const auto signs = hn::And(hn::Xor(value, flip), sign);
      number = hn::Max(hn::Or(least_line(hn::Abs(value)), signs), simd::set(-127));
    } else {
      const auto least = least_line(value);
      number = hn::IfThenElse(hn::Gt(value, simd::set(0)), hn::Max(least, simd::set(1)), least);
    }
    // f32 values from 2^23 on are whole numbers, so the sum is rounded to one; its lowest bits are the code.
    const auto whole = hn::Add(number, simd::set(0x1.8p23f));
    store_bytes(hn::TruncateTo(U8(), hn::BitCast(U32(), whole)), codes, at);
  });
}

}  // namespace codes
}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
