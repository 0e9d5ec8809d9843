#include "kernels/limits.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "core/bytes.h"
#include "core/error.h"
#include "kernels/simd.h"
// For hwy::FlushStream().
#include <hwy/cache_control.h>

#include "kernels/simd-inl.h"

#ifndef SLUICE_KERNELS_LIMITS_TYPES
#define SLUICE_KERNELS_LIMITS_TYPES
namespace sluice::kernels {

// The first of a stream's consecutive blocks. `turn` bytes of it are moved before the next stream's turn.
struct StreamBlock {
  std::byte* data;
  std::size_t bytes, turn;
  MemoryStream::Touch touch;
};

}  // namespace sluice::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

using Words = hn::CappedTag<std::uint32_t, 16>;
using WordVector = hn::Vec<Words>;

// `zero` is 0, which the compiler does not know: so it cannot drop the write of an unchanged value.
WordVector pass(std::uint32_t* data, std::size_t count, MemoryStream::Touch touch, bool past_caches,
                WordVector zero) {
  const Words d;
  const std::size_t lanes = hn::Lanes(d);
  WordVector all = hn::Zero(d);
  if (touch == MemoryStream::Touch::kRead) {
    for (std::size_t i = 0; i < count; i += lanes) {
      ask_far_ahead({data, Dtype::kF32}, i);
      all = hn::Xor(all, hn::Load(d, data + i));
    }
  } else if (touch == MemoryStream::Touch::kUpdate) {
    for (std::size_t i = 0; i < count; i += lanes) {
      ask_ahead({data, Dtype::kF32}, i);
      hn::Store(hn::Or(hn::Load(d, data + i), zero), d, data + i);
    }
  } else if (past_caches) {
    for (std::size_t i = 0; i < count; i += lanes) hn::Stream(zero, d, data + i);
  } else {
    for (std::size_t i = 0; i < count; i += lanes) hn::Store(zero, d, data + i);
  }
  return all;
}

std::uint32_t pass_block(std::span<const StreamBlock> first, std::size_t index, bool past_caches,
                         std::uint32_t zero) {
  const Words d;
  WordVector all = hn::Zero(d);
  bool more = true;
  for (std::size_t turn = 0; more; ++turn) {
    more = false;
    for (const StreamBlock& block : first) {
      const std::size_t at = turn * block.turn;
      if (at >= block.bytes) continue;
      more = true;
      auto* const data = reinterpret_cast<std::uint32_t*>(block.data + index * block.bytes + at);
      all = hn::Xor(all, pass(data, std::min(block.turn, block.bytes - at) / 4, block.touch, past_caches,
                              hn::Set(d, zero)));
    }
  }
  if (past_caches) hwy::FlushStream();
  HWY_ALIGN std::uint32_t words[hn::MaxLanes(d)];
  hn::Store(all, d, words);
  std::uint32_t result = 0;
  for (const std::uint32_t word : words) result ^= word;
  return result;
}

// kSums independent sums are enough to hide the latency of a multiply-add.
float multiply_add_rounds(std::size_t rounds, float factor) {
  const F32 d;
  const auto f = hn::Set(d, factor);
  auto a = hn::Set(d, 1.0f), b = a, c = a, e = a, g = a, h = a, i = a, j = a, k = a, l = a;
  for (std::size_t round = 0; round < rounds; ++round) {
    a = mul_add(a, f, f), b = mul_add(b, f, f), c = mul_add(c, f, f), e = mul_add(e, f, f);
    g = mul_add(g, f, f), h = mul_add(h, f, f), i = mul_add(i, f, f), j = mul_add(j, f, f);
    k = mul_add(k, f, f), l = mul_add(l, f, f);
  }
  const auto sum = hn::Add(hn::Add(hn::Add(a, b), hn::Add(c, e)),
                           hn::Add(hn::Add(g, h), hn::Add(hn::Add(i, j), hn::Add(k, l))));
  return hn::GetLane(sum);
}

std::size_t lanes() { return hn::Lanes(F32()); }

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::kernels {
HWY_EXPORT(pass_block);
HWY_EXPORT(multiply_add_rounds);
HWY_EXPORT(lanes);

namespace {
constexpr std::size_t kSums = 10;   // independent sums in multiply_add_rounds()
constexpr std::size_t kShares = 8;  // per thread, so that other threads can take over from a late one

std::size_t turn_of(const MemoryStream& stream, std::size_t widest, Turns turns) {
  constexpr std::size_t kPage = 4096, kLines = 256, kLine = 64;
  if (turns == Turns::kPages) return kPage;
  return round_up(kLines * stream.bytes / widest, kLine);
}
}  // namespace

std::uint32_t go_through(Threads& threads, std::span<const MemoryStream> streams, Stores stores,
                         Turns turns) {
  std::size_t widest = 1;
  for (const MemoryStream& stream : streams) widest = std::max(widest, stream.bytes);
  for (const MemoryStream& stream : streams)
    ensure(
        stream.bytes % (64 * kStreamBlocks) == 0 && reinterpret_cast<std::uintptr_t>(stream.data) % 64 == 0,
        "a stream of {} bytes at {} cannot be cut into {} aligned blocks", stream.bytes,
        static_cast<void*>(stream.data), kStreamBlocks);
  static std::atomic<std::uint32_t> zero{0};
  std::atomic<std::uint32_t> result{0};
  std::vector<StreamBlock> first;
  for (const MemoryStream& stream : streams)
    first.push_back(
        {stream.data, stream.bytes / kStreamBlocks, turn_of(stream, widest, turns), stream.touch});
  threads.parallel_for(kStreamBlocks, 1, [&](std::size_t index, std::size_t) {
    result ^= HWY_DYNAMIC_DISPATCH(pass_block)(first, index, stores == Stores::kPastCaches, zero);
  });
  return result;
}

double multiply_add(Threads& threads, std::size_t rounds) {
  static std::atomic<float> factor{0.5f}, sink{0};
  const std::size_t count = kShares * static_cast<std::size_t>(threads.count());
  threads.parallel_for(count, 1, [&](std::size_t, std::size_t) {
    sink = HWY_DYNAMIC_DISPATCH(multiply_add_rounds)(rounds, factor);
  });
  return 2.0 * static_cast<double>(rounds * count * kSums * HWY_DYNAMIC_DISPATCH(lanes)());
}

}  // namespace sluice::kernels
#endif  // HWY_ONCE
