#include "optim/eight_bit.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "core/error.h"
#include "kernels/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/eight_bit.cc"
#include <hwy/foreach_target.h>

#include "kernels/simd-inl.h"

#ifndef SLUICE_OPTIM_EIGHT_BIT_TYPES
#define SLUICE_OPTIM_EIGHT_BIT_TYPES
namespace sluice::optim {

// Magnitudes are numbered by rank, from 0 for zero on. The rank of a magnitude of at most 1 is found by the
// upper half of its bits: `buckets` holds, for each of these from first_bucket on, the rank of its least
// value (upper 16 bits), and the lower half of the greatest value that still has that rank.
struct CodeTable {
  std::array<float, 256> values = {};
  std::vector<std::int32_t> buckets;
  std::int32_t first_bucket = 0;
  std::int32_t least_rank = 0;  // of what is above zero
  std::int32_t negative = 0;    // is added to the rank of what is below zero
  std::int32_t greatest_negative_rank = 0;
  std::uint8_t one = 0;  // the code of 1
};

}  // namespace sluice::optim
#endif

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = kernels::HWY_NAMESPACE;

using I32 = hn::Rebind<std::int32_t, simd::F32>;
using U8 = hn::Rebind<std::uint8_t, simd::F32>;

// The value of the largest magnitude, with its sign, so that it is held exactly though the maps have no -1.
// What is not finite is the largest.
HWY_INLINE float scale_of(const float* values, std::size_t n) {
  auto greatest = simd::set(0), least = simd::set(0);
  auto magnitude = hn::Zero(I32());
  simd::for_each_vector(n, [&](auto at) HWY_ATTR {
    const auto value = simd::load(values, at);
    greatest = hn::Max(greatest, value);
    least = hn::Min(least, value);
    magnitude = hn::Max(magnitude, hn::BitCast(I32(), hn::Abs(value)));
  });
  HWY_ALIGN float above[simd::kLanes], below[simd::kLanes];
  HWY_ALIGN std::int32_t bits[simd::kLanes];
  hn::Store(greatest, simd::F32(), above);
  hn::Store(least, simd::F32(), below);
  hn::Store(magnitude, I32(), bits);
  const float most = std::bit_cast<float>(*std::max_element(bits, bits + simd::kLanes));
  if (std::isnan(most)) return std::numeric_limits<float>::quiet_NaN();
  if (std::isinf(most)) return most;
  const float up = *std::max_element(above, above + simd::kLanes);
  const float down = *std::min_element(below, below + simd::kLanes);
  if (most == 0) return 0;
  return up >= -down ? up : down;
}

template <class V>
HWY_INLINE void store_codes(V codes, std::uint8_t* to, simd::Whole at) {
  hn::StoreU(hn::DemoteTo(U8(), codes), U8(), to + at.begin);
}
template <class V>
HWY_INLINE void store_codes(V codes, std::uint8_t* to, simd::Part at) {
  HWY_ALIGN std::uint8_t lanes[simd::kLanes];
  store_codes(codes, lanes, simd::Whole{0});
  std::memcpy(to + at.begin, lanes, at.count);
}

HWY_INLINE hn::Vec<I32> load_codes(const std::uint8_t* from, simd::Whole at) {
  return hn::PromoteTo(I32(), hn::LoadU(U8(), from + at.begin));
}
HWY_INLINE hn::Vec<I32> load_codes(const std::uint8_t* from, simd::Part at) {
  HWY_ALIGN std::uint8_t lanes[simd::kLanes] = {};
  std::memcpy(lanes, from + at.begin, at.count);
  return load_codes(lanes, simd::Whole{0});
}

HWY_INLINE void encode_block(const CodeTable& table, std::size_t n, const float* values, float scale,
                             std::uint8_t* codes) {
  const I32 d;
  const auto first = hn::Set(d, table.first_bucket);
  const auto last = hn::Set(d, static_cast<std::int32_t>(table.buckets.size()) - 1);
  const auto lower_half = hn::Set(d, 0xffff);
  const std::int32_t* const buckets = table.buckets.data();
  simd::for_each_vector(n, [&](auto at) HWY_ATTR {
    const auto x = hn::Div(simd::load(values, at), simd::set(scale));
    const auto bits = hn::BitCast(d, hn::Abs(x));
    const auto index = hn::Min(hn::Max(hn::Sub(hn::ShiftRight<16>(bits), first), hn::Zero(d)), last);
    const auto bucket = hn::GatherIndex(d, buckets, index);
    const auto is_next = hn::Gt(hn::And(bits, lower_half), hn::And(bucket, lower_half));
    auto rank = hn::Add(hn::ShiftRight<16>(bucket), hn::IfThenElse(is_next, hn::Set(d, 1), hn::Zero(d)));
    rank = hn::IfThenElse(hn::Gt(bits, hn::Zero(d)), hn::Max(rank, hn::Set(d, table.least_rank)), rank);
    const auto mirrored =
        hn::Add(hn::Min(rank, hn::Set(d, table.greatest_negative_rank)), hn::Set(d, table.negative));
    const auto is_negative = hn::And(hn::RebindMask(d, hn::Lt(x, simd::set(0))), hn::Gt(rank, hn::Zero(d)));
    store_codes(hn::IfThenElse(is_negative, mirrored, rank), codes, at);
  });
}

void encode_blocks(const CodeTable& table, std::size_t n, const float* values, std::uint8_t* codes,
                   float* scales) {
  for (std::size_t i = 0; i < n; i += kScaleBlock) {
    const std::size_t count = std::min(kScaleBlock, n - i);
    const float scale = scale_of(values + i, count);
    scales[i / kScaleBlock] = scale;
    if (scale == 0 || !std::isfinite(scale))
      std::memset(codes + i, scale == 0 ? 0 : table.one, count);
    else
      encode_block(table, count, values + i, scale, codes + i);
  }
}

void decode_blocks(const CodeTable& table, std::size_t n, const std::uint8_t* codes, const float* scales,
                   float* values) {
  for (std::size_t i = 0; i < n; i += kScaleBlock) {
    const auto scale = simd::set(scales[i / kScaleBlock]);
    simd::for_each_vector(std::min(kScaleBlock, n - i), [&](auto at) HWY_ATTR {
      const auto x = hn::GatherIndex(simd::F32(), table.values.data(), load_codes(codes + i, at));
      simd::store(hn::Mul(x, scale), values + i, at);
    });
  }
}

}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::optim {
HWY_EXPORT(encode_blocks);
HWY_EXPORT(decode_blocks);

namespace {

constexpr int kExponents = 7;

// The magnitudes in ascending order, from 0 to 1. Of 7 bits (8 without a sign) e leading zeros stand for
// 10^-e, the one after them ends these, and the other b bits choose one of 2^b equal parts of [0.1, 1], of
// which the value is the middle. No bit that is set stands for 0; what the sign (or else the last bit) would
// make of it, for 1.
std::vector<float> magnitudes(int bits) {
  std::vector<float> result = {0};
  double ten = 1e6;  // 10^e
  for (int e = kExponents - 1; e >= 0; --e, ten /= 10) {
    const int parts = 1 << (bits - 1 - e);
    for (int j = 0; j < parts; ++j)  // one division of whole numbers
      result.push_back(static_cast<float>((2.0 * parts + 9.0 * (2 * j + 1)) / (20.0 * parts * ten)));
  }
  result.push_back(1);
  return result;
}

std::int32_t upper_half(float value) {
  return static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}

// The greatest f32 that is no further from a than from b, its neighbour above.
float greatest_of(float a, float b) {
  const double middle = (static_cast<double>(a) + b) / 2;
  const auto nearest = static_cast<float>(middle);
  return nearest > middle ? std::nextafter(nearest, 0.0f) : nearest;
}

void fill_buckets(const std::vector<float>& magnitudes, CodeTable& table) {
  constexpr std::int32_t kAll = 0xffff;  // the whole bucket has one rank
  table.first_bucket = upper_half(greatest_of(magnitudes[0], magnitudes[1])) - 1;
  std::int32_t rank = 0;
  for (std::int32_t bucket = table.first_bucket; bucket <= upper_half(1); ++bucket) {
    std::int32_t end = kAll;
    const std::int32_t begin = rank;
    while (static_cast<std::size_t>(rank) + 1 < magnitudes.size()) {
      const auto at = static_cast<std::size_t>(rank);
      const auto bits = std::bit_cast<std::uint32_t>(greatest_of(magnitudes[at], magnitudes[at + 1]));
      if (static_cast<std::int32_t>(bits >> 16) != bucket) break;
      ensure(rank == begin, "two borders between codes lie in one bucket");
      end = static_cast<std::int32_t>(bits & 0xffffu);
      ++rank;
    }
    table.buckets.push_back(begin << 16 | end);
  }
}

CodeTable make_table(bool is_signed) {
  const std::vector<float> all = magnitudes(is_signed ? 7 : 8);
  CodeTable table;
  fill_buckets(all, table);
  std::copy(all.begin(), all.end(), table.values.begin());
  table.one = static_cast<std::uint8_t>(all.size() - 1);
  if (!is_signed) {
    table.least_rank = 1;
    return table;
  }
  table.negative = 128;
  table.greatest_negative_rank = 127;
  for (std::size_t rank = 1; rank < 128; ++rank) table.values[128 + rank] = -all[rank];
  return table;
}

const CodeTable& table_of(CodeMap map) {
  static const CodeTable with_sign = make_table(true), without = make_table(false);
  return map == CodeMap::kSigned ? with_sign : without;
}

}  // namespace

std::span<const float, 256> code_values(CodeMap map) { return table_of(map).values; }

void encode(std::size_t n, CodeMap map, const float* values, std::uint8_t* codes, float* scales) {
  HWY_DYNAMIC_DISPATCH(encode_blocks)(table_of(map), n, values, codes, scales);
}

void decode(std::size_t n, CodeMap map, const std::uint8_t* codes, const float* scales, float* values) {
  HWY_DYNAMIC_DISPATCH(decode_blocks)(table_of(map), n, codes, scales, values);
}

}  // namespace sluice::optim
#endif  // HWY_ONCE
