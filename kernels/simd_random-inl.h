// The words of CounterRandom (core/random.h), several blocks at once. Compiled once for each target: include
// it after hwy/foreach_target.h.
#if defined(SLUICE_KERNELS_SIMD_RANDOM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_KERNELS_SIMD_RANDOM_INL_H_
#undef SLUICE_KERNELS_SIMD_RANDOM_INL_H_
#else
#define SLUICE_KERNELS_SIMD_RANDOM_INL_H_
#endif

#include <iterator>

#include "core/random.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

inline constexpr std::size_t kWordChunk = 256;

struct WordStream {
  std::uint64_t seed, stream, first_index;
};

// The keys of each round, in memory, because a load broadcasts a value to a vector at no cost.
struct PhiloxKeys {
  HWY_INLINE explicit PhiloxKeys(std::uint64_t seed) {
    auto low = static_cast<std::uint32_t>(seed), high = static_cast<std::uint32_t>(seed >> 32);
    for (std::size_t round = 0; round < kPhiloxRounds; ++round, low += 0x9E3779B9u, high += 0xBB67AE85u) {
      lows[round] = low;
      highs[round] = high;
    }
  }
  std::uint64_t lows[kPhiloxRounds], highs[kPhiloxRounds];
};

using U64 = hn::CappedTag<std::uint64_t, 8>;
using U64Vector = hn::Vec<U64>;

// Multiplies the lower half of each lane by b, to 64 bits.
HWY_INLINE U64Vector multiply_wide(U64Vector a, std::uint32_t b) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(U64(), (hn::GetLane(a) & 0xFFFFFFFFu) * b);
#else
  const hn::Repartition<std::uint32_t, U64> u32;
  return hn::MulEven(hn::BitCast(u32, a), hn::BitCast(u32, hn::Set(U64(), b)));
#endif
}

// Moves the upper half of each lane to the lower half. The upper half is arbitrary then.
HWY_INLINE U64Vector upper_half(U64Vector x) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  // A shift would wait for the same execution unit as the multiplications.
  return hn::BitCast(U64(), hn::Shuffle2301(hn::BitCast(hn::Repartition<std::uint32_t, U64>(), x)));
#else
  return hn::ShiftRight<32>(x);
#endif
}

// The block that each lane computes, in an order in which a block's halves are interleaved within 128 bits.
#if HWY_TARGET == HWY_SCALAR
HWY_ALIGN inline constexpr std::uint64_t kBlockOfLane[] = {0};
#elif HWY_TARGET == HWY_AVX3
HWY_ALIGN inline constexpr std::uint64_t kBlockOfLane[] = {0, 4, 1, 5, 2, 6, 3, 7};
#elif HWY_TARGET == HWY_AVX2
HWY_ALIGN inline constexpr std::uint64_t kBlockOfLane[] = {0, 2, 1, 3};
#else
HWY_ALIGN inline constexpr std::uint64_t kBlockOfLane[] = {0, 1};
#endif
static_assert(std::size(kBlockOfLane) == hn::MaxLanes(U64()));

// Computes one block in each lane of kUnroll vectors, which share the keys. Words 0 and 1 of a block go to
// `low`, 2 and 3 to `high`. Upper halves are cleared at the end only, since the multiplications ignore them.
template <std::size_t kUnroll, std::size_t kRounds>
HWY_INLINE void philox_lanes(std::uint64_t first_block, std::uint64_t stream, const PhiloxKeys& keys,
                             U64Vector* low, U64Vector* high) {
  U64Vector c0[kUnroll], c1[kUnroll], c2[kUnroll], c3[kUnroll];
  HWY_UNROLL(4)
  for (std::size_t i = 0; i < kUnroll; ++i) {
    c0[i] = hn::Add(hn::Set(U64(), first_block + i * hn::MaxLanes(U64())), hn::Load(U64(), kBlockOfLane));
    c1[i] = hn::ShiftRight<32>(c0[i]);
    c2[i] = hn::Set(U64(), stream);
    c3[i] = hn::Set(U64(), stream >> 32);
  }
  static_assert(kRounds <= kPhiloxRounds);
  HWY_UNROLL(10)
  for (std::size_t round = 0; round < kRounds; ++round) {
    const auto k0 = hn::Set(U64(), keys.lows[round]), k1 = hn::Set(U64(), keys.highs[round]);
    HWY_UNROLL(4)
    for (std::size_t i = 0; i < kUnroll; ++i) {
      const auto a = multiply_wide(c0[i], 0xD2511F53u), b = multiply_wide(c2[i], 0xCD9E8D57u);
      c0[i] = hn::Xor3(upper_half(b), c1[i], k0);
      c2[i] = hn::Xor3(upper_half(a), c3[i], k1);
      c1[i] = b;
      c3[i] = a;
    }
  }
  const auto mask = hn::Set(U64(), 0xFFFFFFFFu);
  HWY_UNROLL(4)
  for (std::size_t i = 0; i < kUnroll; ++i) {
    low[i] = hn::Or(hn::And(c0[i], mask), hn::ShiftLeft<32>(c1[i]));
    high[i] = hn::Or(hn::And(c2[i], mask), hn::ShiftLeft<32>(c3[i]));
  }
}

// Makes kCount words, beginning with the first word of a block.
template <std::size_t kCount, std::size_t kRounds = kPhiloxRounds>
HWY_INLINE void fill_words(std::uint64_t stream, const PhiloxKeys& keys, std::uint64_t first_block,
                           std::uint32_t* words) {
  constexpr std::size_t kBlocks = hn::MaxLanes(U64()), kVectors = kCount / (4 * kBlocks);
  constexpr std::size_t kUnroll = kVectors % 4 == 0 ? 4 : 1;
  static_assert(kCount % (4 * kBlocks * kUnroll) == 0);
  for (std::size_t i = 0; i < kCount / 4; i += kBlocks * kUnroll) {
    U64Vector low[kUnroll], high[kUnroll];
    philox_lanes<kUnroll, kRounds>(first_block + i, stream, keys, low, high);
    HWY_UNROLL(4)
    for (std::size_t j = 0; j < kUnroll; ++j) {
      std::uint32_t* const to = words + 4 * (i + j * kBlocks);
#if HWY_TARGET == HWY_SCALAR
      const std::uint64_t block[] = {hn::GetLane(low[j]), hn::GetLane(high[j])};
      std::memcpy(to, block, sizeof block);
#else
      const hn::Repartition<std::uint32_t, U64> u32;
      hn::StoreU(hn::BitCast(u32, hn::InterleaveLower(U64(), low[j], high[j])), u32, to);
      hn::StoreU(hn::BitCast(u32, hn::InterleaveUpper(U64(), low[j], high[j])), u32, to + 2 * kBlocks);
#endif
    }
  }
}

// Calls body(words, begin, count) for chunks of [0, n); words[i] belongs to element begin + i. A chunk ends
// where the index in the stream is a multiple of kWordChunk. It is safe to load a whole vector at any word.
template <class Body>
HWY_INLINE void for_each_word_chunk(const WordStream& s, std::size_t n, const Body& body) {
  HWY_ALIGN std::uint32_t words[kWordChunk + kLanes] = {};
  const PhiloxKeys keys(s.seed);
  for (std::size_t begin = 0; begin < n;) {
    const std::uint64_t index = s.first_index + begin;
    const std::size_t skip = index % kWordChunk;
    const std::size_t count = n - begin < kWordChunk - skip ? n - begin : kWordChunk - skip;
    fill_words<kWordChunk>(s.stream, keys, (index - skip) / 4, words);
    body(words + skip, begin, count);
    begin += count;
  }
}

// Computes to_unit_interval() of core/random.h.
HWY_INLINE F32Vector unit_interval(hn::Vec<hn::Rebind<std::uint32_t, F32>> words) {
  const hn::Rebind<std::int32_t, F32> i32;
  return hn::Mul(hn::ConvertTo(F32(), hn::BitCast(i32, hn::ShiftRight<8>(words))), set(0x1.0p-24f));
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
