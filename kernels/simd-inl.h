// Vectors of f32 with at most 16 lanes: loads and stores of f32, bf16 and f16, loops with a tail, sums in the
// written order. Compiled once for each target (so without #pragma once): include it after
// hwy/foreach_target.h.
#if defined(SLUICE_KERNELS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_KERNELS_SIMD_INL_H_
#undef SLUICE_KERNELS_SIMD_INL_H_
#else
#define SLUICE_KERNELS_SIMD_INL_H_
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/dtype.h"
#include "core/pairwise.h"
#include "kernels/simd.h"

// For a lambda that is too large for the compiler to inline by itself.
#undef SLUICE_BODY
#define SLUICE_BODY HWY_ATTR __attribute__((always_inline))

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::CappedTag<float, 16>;
using F32Vector = hn::Vec<F32>;
inline constexpr std::size_t kLanes = hn::MaxLanes(F32());

inline constexpr std::size_t kLine = 64;  // bytes of a cache line

// The elements of one step of a loop: a whole vector from `begin` on, or the shorter tail.
struct Whole {
  std::size_t begin;
};
struct Part {
  std::size_t begin, count;
};

// a * b + c, rounded once on every target.
template <class V>
HWY_INLINE V mul_add(V a, V b, V c) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  const hn::DFromV<V> d;
  hn::TFromD<hn::DFromV<V>> x[hn::MaxLanes(d)], y[hn::MaxLanes(d)], z[hn::MaxLanes(d)];
  hn::StoreU(a, d, x);
  hn::StoreU(b, d, y);
  hn::StoreU(c, d, z);
  for (std::size_t i = 0; i < hn::MaxLanes(d); ++i) z[i] = std::fma(x[i], y[i], z[i]);
  return hn::LoadU(d, z);
#else
  return hn::MulAdd(a, b, c);
#endif
}

template <class D>
HWY_INLINE hn::Vec<D> widen(D d, const Bf16* values) {
  const hn::Rebind<std::uint32_t, D> d32;
  const hn::Rebind<std::uint16_t, D> d16;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const std::uint16_t*>(values));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}

// Returns the upper 16 bits of each lane.
template <class D32>
HWY_INLINE auto cut([[maybe_unused]] D32 d32, hn::Vec<D32> bits) {
  return hn::TruncateTo(hn::Rebind<std::uint16_t, D32>(), hn::ShiftRight<16>(bits));
}
#if HWY_TARGET != HWY_SCALAR
// The same for two vectors at once, which takes less than twice the time of one.
template <class D32>
HWY_INLINE auto cut([[maybe_unused]] D32 d32, hn::Vec<D32> low, hn::Vec<D32> high) {
  const hn::Repartition<std::uint16_t, D32> d16;
  return hn::ConcatOdd(d16, hn::BitCast(d16, high), hn::BitCast(d16, low));
}
#endif

// Adds half a unit of bf16's last place where the truncated value is odd, and a little less where it is even,
// so that truncation then rounds to nearest even.
template <class D32>
HWY_INLINE hn::Vec<D32> raised_to_bf16(D32 d32, hn::Vec<D32> bits) {
  const auto raised = hn::Add(bits, hn::Set(d32, 0x7fff));
#if HWY_TARGET == HWY_AVX3
  const auto odd = hn::TestBit(bits, hn::Set(d32, 0x10000));
  return hn::IfThenElse(odd, hn::Add(raised, hn::Set(d32, 1)), raised);
#else
  return hn::Add(raised, hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1)));
#endif
}

// Rounds as to_bf16() in core/dtype.h. The result is in the upper 16 bits; the lower ones are arbitrary.
template <class D>
HWY_INLINE auto wide_bf16_bits([[maybe_unused]] D d, hn::Vec<D> value) {
  const hn::Rebind<std::uint32_t, D> d32;
  const auto bits = hn::BitCast(d32, value), nan = hn::Or(bits, hn::Set(d32, 0x400000));
  return hn::IfThenElse(hn::RebindMask(d32, hn::IsNaN(value)), nan, raised_to_bf16(d32, bits));
}
template <class D>
HWY_INLINE auto bf16_bits(D d, hn::Vec<D> value) {
  return cut(hn::Rebind<std::uint32_t, D>(), wide_bf16_bits(d, value));
}

template <class D>
HWY_INLINE void narrow(D d, hn::Vec<D> value, Bf16* values) {
  const hn::Rebind<std::uint16_t, D> d16;
  hn::StoreU(bf16_bits(d, value), d16, reinterpret_cast<std::uint16_t*>(values));
}

// Convert as to_f32() and to_f16() in core/dtype.h. Highway's own emulation on targets without f16
// instructions rounds differently.
template <class D>
HWY_INLINE hn::Vec<D> widen(D d, const F16* values) {
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  float wide[hn::MaxLanes(d)];
  for (std::size_t i = 0; i < hn::MaxLanes(d); ++i) wide[i] = to_f32(values[i]);
  return hn::LoadU(d, wide);
#else
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(values)));
#endif
}

template <class D>
HWY_INLINE auto f16_bits([[maybe_unused]] D d, hn::Vec<D> value) {
  const hn::Rebind<std::uint16_t, D> d16;
#if HWY_TARGET == HWY_SCALAR || HWY_TARGET == HWY_EMU128
  float wide[hn::MaxLanes(d)];
  std::uint16_t bits[hn::MaxLanes(d)];
  hn::StoreU(value, d, wide);
  for (std::size_t i = 0; i < hn::MaxLanes(d); ++i) bits[i] = to_f16(wide[i]).bits;
  return hn::LoadU(d16, bits);
#else
  return hn::BitCast(d16, hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), value));
#endif
}

template <class D>
HWY_INLINE void narrow(D d, hn::Vec<D> value, F16* values) {
  hn::StoreU(f16_bits(d, value), hn::Rebind<std::uint16_t, D>(), reinterpret_cast<std::uint16_t*>(values));
}

// The type is tested for every vector: a predicted branch costs less than a copy of each loop for every
// combination of types.
template <class D>
HWY_INLINE hn::Vec<D> load(D d, ConstArray array, Whole at) {
  if (array.type == Dtype::kF32) return hn::LoadU(d, array.f32() + at.begin);
  return array.type == Dtype::kBf16 ? widen(d, array.bf16() + at.begin) : widen(d, array.f16() + at.begin);
}

template <class D>
HWY_INLINE void store(D d, hn::Vec<D> value, Array array, Whole at) {
  if (array.type == Dtype::kF32)
    hn::StoreU(value, d, array.f32() + at.begin);
  else if (array.type == Dtype::kBf16)
    narrow(d, value, array.bf16() + at.begin);
  else
    narrow(d, value, array.f16() + at.begin);
}

// Non-temporal store, for data that is not read soon, so that a line that is only written is not read first.
// REQUIRES: stores_past_caches(array); the loop calls hwy::FlushStream() after its last store.
HWY_INLINE void store_past_caches(F32Vector value, Array array, Whole at) {
  const hn::Rebind<std::uint16_t, F32> d16;
  auto* const narrow = reinterpret_cast<std::uint16_t*>(array.data) + at.begin;
  if (array.type == Dtype::kF32)
    hn::Stream(value, F32(), array.f32() + at.begin);
  else if (array.type == Dtype::kBf16)
    hn::Stream(bf16_bits(F32(), value), d16, narrow);
  else
    hn::Stream(f16_bits(F32(), value), d16, narrow);
}
// Whether whole vectors from the array's beginning on are aligned for such stores.
HWY_INLINE bool stores_past_caches(Array array) {
  return reinterpret_cast<std::uintptr_t>(array.data) % kLine == 0;
}

HWY_INLINE std::size_t bytes_of(Dtype type) { return type == Dtype::kF32 ? sizeof(float) : sizeof(Bf16); }

// Prefetches the line that is kAhead bytes ahead, since the latency of memory exceeds the reach of
// out-of-order execution.
inline constexpr std::size_t kAhead = 2048;  // bytes
HWY_INLINE void ask_ahead(ConstArray array, std::size_t at) {
  hwy::Prefetch(static_cast<const std::byte*>(array.data) + at * bytes_of(array.type) + kAhead);
}

// Prefetches further ahead, into the second-level cache. A loop limited by reading one array needs it,
// because the first-level cache has only a few lines in flight.
inline constexpr std::size_t kFarAhead = 8192;  // bytes
HWY_INLINE void ask_far_ahead(ConstArray array, std::size_t at) {
  constexpr int kToRead = 0, kSecondLevel = 2;
  const auto* const from = static_cast<const std::byte*>(array.data) + at * bytes_of(array.type);
  __builtin_prefetch(from + kFarAhead, kToRead, kSecondLevel);
}

// Prefetches all lines of kCount elements.
template <std::size_t kCount>
HWY_INLINE void ask_ahead(ConstArray array, std::size_t at) {
  const std::size_t size = bytes_of(array.type);
  const auto* const from = static_cast<const std::byte*>(array.data) + at * size + kAhead;
  HWY_UNROLL(4)
  for (std::size_t line = 0; line < kCount * sizeof(Bf16); line += kLine) hwy::Prefetch(from + line);
  if (size == sizeof(Bf16)) return;
  HWY_UNROLL(4)
  for (std::size_t line = kCount * sizeof(Bf16); line < kCount * sizeof(float); line += kLine)
    hwy::Prefetch(from + line);
}

// Lanes from at.count on are zero.
template <class D>
HWY_INLINE hn::Vec<D> load(D d, ConstArray array, Part at) {
  HWY_ALIGN float lanes[hn::MaxLanes(d)] = {};
  const std::size_t size = bytes_of(array.type);
  std::memcpy(lanes, static_cast<const std::byte*>(array.data) + at.begin * size, at.count * size);
  return load(d, ConstArray{lanes, array.type}, Whole{0});
}

template <class D>
HWY_INLINE void store(D d, hn::Vec<D> value, Array array, Part at) {
  HWY_ALIGN float lanes[hn::MaxLanes(d)];
  store(d, value, Array{lanes, array.type}, Whole{0});
  const std::size_t size = bytes_of(array.type);
  std::memcpy(static_cast<std::byte*>(array.data) + at.begin * size, lanes, at.count * size);
}

template <class At>
HWY_INLINE F32Vector load(ConstArray array, At at) {
  return load(F32(), array, at);
}
template <class At>
HWY_INLINE F32Vector load(const float* values, At at) {
  return load(F32(), ConstArray{values, Dtype::kF32}, at);
}
template <class At>
HWY_INLINE void store(F32Vector value, Array array, At at) {
  store(F32(), value, array, at);
}
template <class At>
HWY_INLINE void store(F32Vector value, float* values, At at) {
  store(F32(), value, Array{values, Dtype::kF32}, at);
}
HWY_INLINE F32Vector set(float value) { return hn::Set(F32(), value); }

// kCount vectors of consecutive elements. They are members, because an array would not stay in registers.
template <std::size_t kCount>
struct Vectors;
template <>
struct Vectors<1> {
  F32Vector v0;
  template <class Make>  // make(index)
  static HWY_INLINE Vectors make(const Make& make) {
    return {make(0)};
  }
  template <class Body>  // body(vector, index)
  HWY_INLINE void each(const Body& body) const {
    body(v0, 0);
  }
  HWY_INLINE F32Vector sum() const { return v0; }
};
template <>
struct Vectors<4> {
  F32Vector v0, v1, v2, v3;
  template <class Make>
  static HWY_INLINE Vectors make(const Make& make) {
    return {make(0), make(1), make(2), make(3)};
  }
  template <class Body>
  HWY_INLINE void each(const Body& body) const {
    body(v0, 0);
    body(v1, 1);
    body(v2, 2);
    body(v3, 3);
  }
  HWY_INLINE F32Vector sum() const { return hn::Add(hn::Add(v0, v1), hn::Add(v2, v3)); }
};

HWY_INLINE Whole next(Whole at, std::size_t vectors) { return {at.begin + vectors * kLanes}; }
HWY_INLINE Part next(Part at, std::size_t) { return at; }

// The type is tested once for all vectors.
template <std::size_t kCount>
HWY_INLINE Vectors<kCount> load_vectors(ConstArray array, Whole at) {
  using V = Vectors<kCount>;
  if (array.type == Dtype::kF32)
    return V::make([=](std::size_t j)
                       SLUICE_BODY { return hn::LoadU(F32(), array.f32() + next(at, j).begin); });
  if (array.type == Dtype::kBf16)
    return V::make([=](std::size_t j) SLUICE_BODY { return widen(F32(), array.bf16() + next(at, j).begin); });
  return V::make([=](std::size_t j) SLUICE_BODY { return widen(F32(), array.f16() + next(at, j).begin); });
}
template <std::size_t kCount>
HWY_INLINE Vectors<kCount> load_vectors(ConstArray array, Part at) {
  return {load(array, at)};
}

// Returns true only if no vector has a NaN. Infinities may make it false, too.
template <std::size_t kCount>
HWY_INLINE bool are_numbers(const Vectors<kCount>& vectors) {
  return hn::AllFalse(F32(), hn::IsNaN(vectors.sum()));
}

// Applies bits(vector, first element) to each vector and calls store(upper 16 bits, first element).
template <std::size_t kCount, class Bits, class Store>
HWY_INLINE void cut_each(const Vectors<kCount>& from, Whole at, const Bits& bits, const Store& store) {
  const hn::Rebind<std::uint32_t, F32> d32;
#if HWY_TARGET != HWY_SCALAR
  if constexpr (kCount == 4) {
    const std::size_t i = at.begin;
    store(cut(d32, bits(from.v0, i), bits(from.v1, i + kLanes)), i);
    return store(cut(d32, bits(from.v2, i + 2 * kLanes), bits(from.v3, i + 3 * kLanes)), i + 2 * kLanes);
  }
#endif
  from.each([&](F32Vector value, std::size_t j) SLUICE_BODY {
    const std::size_t i = next(at, j).begin;
    store(cut(d32, bits(value, i)), i);
  });
}

// Calls store(bits, first element) with each vector rounded to bf16.
template <std::size_t kCount, class Store>
HWY_INLINE void as_bf16(const Vectors<kCount>& from, Whole at, const Store& store) {
  const hn::Rebind<std::uint32_t, F32> d32;
  if (HWY_LIKELY(are_numbers(from)))
    cut_each(
        from, at,
        [=](F32Vector value, std::size_t)
            SLUICE_BODY { return raised_to_bf16(d32, hn::BitCast(d32, value)); },
        store);
  else
    cut_each(
        from, at, [](F32Vector value, std::size_t) SLUICE_BODY { return wide_bf16_bits(F32(), value); },
        store);
}

template <std::size_t kCount>
HWY_INLINE void store_vectors(const Vectors<kCount>& from, Array array, Whole at) {
  if (array.type == Dtype::kF32)
    return from.each([=](F32Vector value, std::size_t j)
                         SLUICE_BODY { hn::StoreU(value, F32(), array.f32() + next(at, j).begin); });
  auto* const to = reinterpret_cast<std::uint16_t*>(array.data);
  if (array.type == Dtype::kBf16)
    return as_bf16(from, at, [=](auto bits, std::size_t i) SLUICE_BODY {
      hn::StoreU(bits, hn::DFromV<decltype(bits)>(), to + i);
    });
  from.each([=](F32Vector value, std::size_t j)
                SLUICE_BODY { narrow(F32(), value, array.f16() + next(at, j).begin); });
}
template <std::size_t kCount>
HWY_INLINE void store_vectors(const Vectors<kCount>& from, Array array, Part at) {
  store(from.v0, array, at);
}

// REQUIRES: stores_past_caches()
template <std::size_t kCount>
HWY_INLINE void store_vectors_past_caches(const Vectors<kCount>& from, Array array, Whole at) {
  auto* const to = reinterpret_cast<std::uint16_t*>(array.data);
  if (array.type == Dtype::kBf16)
    return as_bf16(from, at, [=](auto bits, std::size_t i) SLUICE_BODY {
      hn::Stream(bits, hn::DFromV<decltype(bits)>(), to + i);
    });
  from.each([=](F32Vector value, std::size_t j)
                SLUICE_BODY { store_past_caches(value, array, next(at, j)); });
}

// Calls body(at) for every vector of [0, n).
template <class Body>
HWY_INLINE void for_each_vector(std::size_t n, const Body& body) {
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(Whole{i});
  if (i < n) body(Part{i, n - i});
}

// Adds 16 values pairwise, in place.
template <class T>
HWY_INLINE T add_lanes(T* lanes) {
  for (std::size_t width = 8; width > 0; width /= 2)
    for (std::size_t j = 0; j < width; ++j) lanes[j] = lanes[2 * j] + lanes[2 * j + 1];
  return lanes[0];
}

// Sums one block in the written order (docs/architecture.md, section 9). step(at, sum) adds the elements at
// `at` to sum, lane by lane.
template <class T, class Step>
HWY_INLINE T sum_block(std::size_t begin, std::size_t end, const Step& step) {
  const hn::CappedTag<T, 16> d;
  constexpr std::size_t kWidth = hn::MaxLanes(d);
  constexpr std::size_t kVectors = 16 / kWidth;
  hn::Vec<decltype(d)> sums[kVectors];
  HWY_UNROLL(16)
  for (std::size_t j = 0; j < kVectors; ++j) sums[j] = hn::Zero(d);
  std::size_t i = begin;
  for (; i + 16 <= end; i += 16) {
    HWY_UNROLL(16)
    for (std::size_t j = 0; j < kVectors; ++j) sums[j] = step(Whole{i + j * kWidth}, sums[j]);
  }
  HWY_UNROLL(16)
  for (std::size_t j = 0; j < kVectors; ++j) {
    const std::size_t first = i + j * kWidth;
    if (first >= end) continue;
    const std::size_t count = end - first < kWidth ? end - first : kWidth;
    sums[j] = hn::IfThenElse(hn::FirstN(d, count), step(Part{first, count}, sums[j]), sums[j]);
  }
  HWY_ALIGN T lanes[16];
  HWY_UNROLL(16)
  for (std::size_t j = 0; j < kVectors; ++j) hn::Store(sums[j], d, lanes + j * kWidth);
  return add_lanes(lanes);
}

// Sums a row, [0, n), in the written order.
template <class T, class Step>
HWY_INLINE T sum_in_lanes(std::size_t n, const Step& step) {
  constexpr std::size_t kSumBlock = 4096;
  PairwiseSum<T> sum;
  for (std::size_t i = 0; i < n; i += kSumBlock)
    sum.add(sum_block<T>(i, n - i < kSumBlock ? n : i + kSumBlock, step));
  return sum.total();
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
