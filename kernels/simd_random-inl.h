// The words of CounterRandom (core/random.h), several blocks at once. Compiled once for each target, as
// simd-inl.h.
#if defined(SLUICE_KERNELS_SIMD_RANDOM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_KERNELS_SIMD_RANDOM_INL_H_
#undef SLUICE_KERNELS_SIMD_RANDOM_INL_H_
#else
#define SLUICE_KERNELS_SIMD_RANDOM_INL_H_
#endif

#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

inline constexpr std::size_t kWordChunk = 256;

struct WordStream {
  std::uint64_t seed, stream, first_index;
};

using U64 = hn::CappedTag<std::uint64_t, 8>;
using U64Vector = hn::Vec<U64>;

// The product of the lower halves of the lanes, in 64 bits.
HWY_INLINE U64Vector multiply_wide(U64Vector a, std::uint32_t b) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Set(U64(), (hn::GetLane(a) & 0xFFFFFFFFu) * b);
#else
  const hn::Repartition<std::uint32_t, U64> u32;
  return hn::MulEven(hn::BitCast(u32, a), hn::BitCast(u32, hn::Set(U64(), b)));
#endif
}

// One block a lane: words 0 and 1 in `low`, 2 and 3 in `high`. Upper halves are only cleared at the end,
// since the multiplications do not look at them.
HWY_INLINE void philox_lanes(U64Vector block, const WordStream& s, U64Vector& low, U64Vector& high) {
  auto c0 = block, c1 = hn::ShiftRight<32>(block);
  auto c2 = hn::Set(U64(), s.stream), c3 = hn::Set(U64(), s.stream >> 32);
  auto key0 = static_cast<std::uint32_t>(s.seed), key1 = static_cast<std::uint32_t>(s.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const auto a = multiply_wide(c0, 0xD2511F53u), b = multiply_wide(c2, 0xCD9E8D57u);
    c0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(b), c1), hn::Set(U64(), key0));
    c2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(a), c3), hn::Set(U64(), key1));
    c1 = b;
    c3 = a;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  const auto mask = hn::Set(U64(), 0xFFFFFFFFu);
  low = hn::Or(hn::And(c0, mask), hn::ShiftLeft<32>(c1));
  high = hn::Or(hn::And(c2, mask), hn::ShiftLeft<32>(c3));
}

// kCount words, from the first of a block on.
template <std::size_t kCount>
HWY_INLINE void fill_words(const WordStream& s, std::uint64_t first_block, std::uint32_t* words) {
  constexpr std::size_t kBlocks = hn::MaxLanes(U64());
  static_assert(kCount % (4 * kBlocks) == 0);
  for (std::size_t i = 0; i < kCount / 4; i += kBlocks) {
    U64Vector low, high;
    philox_lanes(hn::Add(hn::Set(U64(), first_block + i), hn::Iota(U64(), 0)), s, low, high);
    HWY_ALIGN std::uint64_t pairs[2 * kBlocks];
    hn::StoreInterleaved2(low, high, U64(), pairs);
    std::memcpy(words + 4 * i, pairs, sizeof pairs);
  }
}

// body(words, begin, count) for pieces of [0, n): words[i] is the word of element begin + i. Pieces end where
// the index in the stream is a multiple of kWordChunk; a vector may be loaded from any of a piece's words.
template <class Body>
HWY_INLINE void for_each_word_chunk(const WordStream& s, std::size_t n, const Body& body) {
  HWY_ALIGN std::uint32_t words[kWordChunk + kLanes] = {};
  for (std::size_t begin = 0; begin < n;) {
    const std::uint64_t index = s.first_index + begin;
    const std::size_t skip = index % kWordChunk;
    const std::size_t count = n - begin < kWordChunk - skip ? n - begin : kWordChunk - skip;
    fill_words<kWordChunk>(s, (index - skip) / 4, words);
    body(words + skip, begin, count);
    begin += count;
  }
}

// to_unit_interval of core/random.h.
HWY_INLINE F32Vector unit_interval(hn::Vec<hn::Rebind<std::uint32_t, F32>> words) {
  const hn::Rebind<std::int32_t, F32> i32;
  return hn::Mul(hn::ConvertTo(F32(), hn::BitCast(i32, hn::ShiftRight<8>(words))), set(0x1.0p-24f));
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
