// Vector code of the attention kernels: rows of 16 f32, packing and transposing of tiles, dropout. Compiled
// once for each target: include it after hwy/foreach_target.h.
#if defined(SLUICE_ATTENTION_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_ATTENTION_SIMD_INL_H_
#undef SLUICE_ATTENTION_SIMD_INL_H_
#else
#define SLUICE_ATTENTION_SIMD_INL_H_
#endif

#include "kernels/attention_common.h"
#include "kernels/simd_math-inl.h"
#include "kernels/simd_random-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

inline constexpr std::size_t kRowVectors = kPanel / kLanes;

// Calls body(lane) for the first lane of every vector of a row.
template <class Body>
HWY_INLINE void for_row(const Body& body) {
  HWY_UNROLL(4)
  for (std::size_t v = 0; v < kRowVectors; ++v) body(v * kLanes);
}

// --- packing
// -----------------------------------------------------------------------------------------------------

template <Dtype kType>
HWY_INLINE void pack_rows(const void* from, std::size_t stride, std::size_t rows, std::size_t width,
                          float factor, float* to) {
  const std::size_t to_stride = packed_stride(width), end = round_up(width, kPanel);
  for (std::size_t i = 0; i < rows; ++i) {
    const void* const row = ConstArray{from, kType}.at(i * stride).data;
    float* const packed = to + i * to_stride;
    for_each_vector(width, [=](auto at) HWY_ATTR {
      store(hn::Mul(load(ConstArray{row, kType}, at), set(factor)), packed, at);
    });
    for (std::size_t c = width; c < end; ++c) packed[c] = 0;
  }
}

// Converts rows of `width` elements, `stride` apart, to f32 times `factor`, with zeros up to a whole panel.
HWY_INLINE void pack_tile(ConstArray from, std::size_t stride, std::size_t rows, std::size_t width,
                          float factor, float* to) {
  if (from.type == Dtype::kF32)
    pack_rows<Dtype::kF32>(from.data, stride, rows, width, factor, to);
  else if (from.type == Dtype::kBf16)
    pack_rows<Dtype::kBf16>(from.data, stride, rows, width, factor, to);
  else
    pack_rows<Dtype::kF16>(from.data, stride, rows, width, factor, to);
}

HWY_INLINE void unpack_tile(const float* from, std::size_t rows, std::size_t width, float factor, Array to,
                            std::size_t stride) {
  const std::size_t from_stride = packed_stride(width);
  for (std::size_t i = 0; i < rows; ++i) {
    const float* const packed = from + i * from_stride;
    const Array row = to.at(i * stride);
    for_each_vector(width, [=](auto at) HWY_ATTR { store(hn::Mul(load(packed, at), set(factor)), row, at); });
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

// REQUIRES: rows and columns are multiples of 4.
HWY_INLINE void transpose(const float* from, std::size_t rows, std::size_t columns, std::size_t from_stride,
                          float* to, std::size_t to_stride) {
  for (std::size_t c = 0; c < columns; c += 4)
    for (std::size_t r = 0; r < rows; r += 4)
      transpose_4x4(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
}

// Packs a tile's queries of one head, as rows and as panels of [width][16 queries]. Missing rows become zero.
HWY_INLINE void pack_queries(const AttentionShape& s, const Tile& tile, ConstArray from, std::size_t stride,
                             float factor, float* rows, float* panels) {
  const std::size_t width = s.head_width, row = packed_stride(width);
  std::fill(rows + tile.queries * row, rows + kTile * row, 0.0f);
  pack_tile(from, stride, tile.queries, width, factor, rows);
  for (std::size_t i = 0; i < tile.queries; i += kPanel)
    transpose(rows + i * row, kPanel, round_up(width, 4), row, panels + i * row, kPanel);
}

HWY_INLINE void pack_keys_and_values(const AttentionShape& s, const Tile& tile, std::size_t b,
                                     std::size_t kv_head, ConstArray k, ConstArray v, float* keys,
                                     float* values) {
  const std::size_t row = b * s.length + tile.first_key, column = kv_head * s.head_width;
  pack_tile(k.at(row * s.k_stride + column), s.k_stride, tile.keys, s.head_width, 1.0f, keys);
  pack_tile(v.at(row * s.v_stride + column), s.v_stride, tile.keys, s.head_width, 1.0f, values);
}

// --- dropout
// -----------------------------------------------------------------------------------------------------

// Makes the factors by which dropout multiplies one query's probabilities of kTile keys, from word `index`
// on: each is 0 or 1 / (1 - p).
HWY_INLINE void dropout_row(const AttentionShape& s, std::uint64_t index, float* factors) {
  constexpr std::size_t kMore = 4 * hn::MaxLanes(U64());  // `index` may lie inside the first block of words
  HWY_ALIGN std::uint32_t words[kTile + kMore];
  const std::size_t skip = index % 4;
  fill_words<kTile + kMore>(s.stream, PhiloxKeys(s.seed), index / 4, words);
  const hn::Rebind<std::uint32_t, F32> u32;
  const float keep = 1.0f - s.dropout;
  for (std::size_t j = 0; j < kTile; j += kLanes) {
    const auto kept = hn::Lt(unit_interval(hn::LoadU(u32, words + skip + j)), set(keep));
    hn::StoreU(hn::IfThenElseZero(kept, set(1.0f / keep)), F32(), factors + j);
  }
}

// Makes the factors of a tile, as [queries][keys] and as [keys][queries].
HWY_INLINE void dropout_tile(const AttentionShape& s, const Tile& tile, std::size_t b, std::size_t h,
                             float* rows, float* columns) {
  for (std::size_t i = 0; i < tile.queries; ++i)
    dropout_row(s, dropout_index(s, b, h, tile.first_query + i) + tile.first_key, rows + i * kTile);
  transpose(rows, kTile, kTile, kTile, columns, kTile);
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
