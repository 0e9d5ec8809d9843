#include "kernels/cuda/sum.h"

#include "core/cuda/kernel.h"
#include "core/cuda/packed.h"

// Gradients that are added in f32, and handed out, with the bits of kernels/reduce.cc and kernels/elementwise.cc.
namespace sluice::kernels {
namespace gpu {

template <class T>
using Own = Packed<T, kSumOwn>;

template <class T>
__device__ __forceinline__ Own<T> load(const T* from, bool packed) {
  if (packed) return *reinterpret_cast<const Own<T>*>(from);
  Own<T> own;
  SLUICE_UNROLL
  for (int i = 0; i < kSumOwn; ++i) own.values[i] = from[i];
  return own;
}
template <class T>
__device__ __forceinline__ void store(const Own<T>& own, T* to, bool packed) {
  if (packed) {
    *reinterpret_cast<Own<T>*>(to) = own;
    return;
  }
  SLUICE_UNROLL
  for (int i = 0; i < kSumOwn; ++i) to[i] = own.values[i];
}

// A product with a factor of 1 is the number itself.
__device__ __forceinline__ float added(const GpuAddition& a, float value, float sum) {
  const float accumulated = sum * a.factor + value;
  return a.accumulate ? accumulated : value;
}

// Adds what a thread has of a block of the grid: elements of kSumOwn lanes, in all rows of so many lanes.
// Returns the sum of their squares, in which neighbouring lanes were added first. Memory is asked for several
// rows at once, before any of them is written.
template <class T, class Widen>
__device__ __forceinline__ double add(const GpuAddition& a, const T* from, std::uint64_t begin, std::uint64_t end,
                                      Widen widen) {
  constexpr int kRows = 8;
  constexpr std::uint64_t kElements = kRows * kSumLanes;
  static_assert(kGridBlock % kElements == 0 && kSumOwn == 4);
  const bool from_packed = is_packed<kSumOwn>(from + begin), to_packed = is_packed<kSumOwn>(a.to + begin);
  double sums[kSumOwn] = {};
  std::uint64_t i = begin;
  for (; i / kElements < end / kElements; i += kElements) {
    Own<T> values[kRows];
    Own<float> results[kRows] = {};
    SLUICE_UNROLL
    for (int row = 0; row < kRows; ++row) values[row] = load(from + i + row * kSumLanes, from_packed);
    if (a.accumulate) {
      SLUICE_UNROLL
      for (int row = 0; row < kRows; ++row) results[row] = load(a.to + i + row * kSumLanes, to_packed);
    }
    SLUICE_UNROLL
    for (int row = 0; row < kRows; ++row) {
      SLUICE_UNROLL
      for (int lane = 0; lane < kSumOwn; ++lane) {
        float& result = results[row].values[lane];
        result = added(a, widen(values[row].values[lane]), result);
        sums[lane] = __fma_rn(result, result, sums[lane]);
      }
      store(results[row], a.to + i + row * kSumLanes, to_packed);
    }
  }
  for (; i < end; i += kSumLanes) {
    SLUICE_UNROLL
    for (int lane = 0; lane < kSumOwn; ++lane) {
      const std::uint64_t at = i + static_cast<std::uint64_t>(lane);
      if (at >= end) continue;
      const float result = added(a, widen(from[at]), a.accumulate ? a.to[at] : 0);
      sums[lane] = __fma_rn(result, result, sums[lane]);
      a.to[at] = result;
    }
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

__device__ __forceinline__ double add(const GpuAddition& a, std::uint64_t begin, std::uint64_t end) {
  if (a.type == Dtype::kF32)
    return add(a, static_cast<const float*>(a.from), begin, end, [](float value) { return value; });
  if (a.type == Dtype::kBf16)
    return add(a, static_cast<const Bf16*>(a.from), begin, end, [](Bf16 value) { return to_f32(value); });
  return add(a, static_cast<const F16*>(a.from), begin, end, [](F16 value) { return to_f32(value); });
}

// Stores a thread's consecutive elements: what the type keeps of a value is multiplied, and what it keeps of
// that is stored.
template <class T, class Widen, class Narrow>
__device__ __forceinline__ void copy(const GpuScaledCopy& c, T* to, std::uint64_t begin, Widen widen, Narrow narrow) {
  const auto scaled = [&](float value) {
    const T kept = narrow(value);
    return c.factor == 1 ? kept : narrow(widen(kept) * c.factor);
  };
  if (c.count - begin >= kSumOwn) {
    const Own<float> values = load(c.from + begin, is_packed<kSumOwn>(c.from + begin));
    Own<T> stored;
    SLUICE_UNROLL
    for (int i = 0; i < kSumOwn; ++i) stored.values[i] = scaled(values.values[i]);
    store(stored, to + begin, is_packed<kSumOwn>(to + begin));
    return;
  }
  for (std::uint64_t i = begin; i < c.count; ++i) to[i] = scaled(c.from[i]);
}

}  // namespace gpu

SLUICE_KERNEL(sluice_add, GpuAddition) {
  constexpr unsigned kThreads = kSumLanes / kSumOwn;  // for a block of the grid
  const std::uint64_t block = blockIdx.x * std::uint64_t{kAddThreads / kThreads} + threadIdx.x / kThreads;
  const std::uint64_t next = (block + 1) * kGridBlock, end = next < arguments.count ? next : arguments.count;
  double sum = gpu::add(arguments, block * kGridBlock + threadIdx.x % kThreads * kSumOwn, end);
  // Both of two threads add the same two numbers, and all threads of a warp take part.
  for (unsigned threads = 1; threads < kThreads; threads *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, threads);
  if (threadIdx.x % kThreads == 0 && block * kGridBlock < arguments.count) arguments.squares[block] = sum;
}

SLUICE_KERNEL(sluice_scaled_copy, GpuScaledCopy) {
  constexpr std::uint64_t kStride = kCopyThreads * kSumOwn;
  const std::uint64_t first = blockIdx.x * std::uint64_t{kCopyElements} + threadIdx.x * kSumOwn;
  for (std::uint64_t i = first; i < first + kCopyElements && i < arguments.count; i += kStride) {
    if (arguments.type == Dtype::kF32)
      gpu::copy(arguments, static_cast<float*>(arguments.to), i, [](float value) { return value; },
                [](float value) { return value; });
    if (arguments.type == Dtype::kBf16)
      gpu::copy(arguments, static_cast<Bf16*>(arguments.to), i, [](Bf16 value) { return to_f32(value); },
                [](float value) { return to_bf16(value); });
    if (arguments.type == Dtype::kF16)
      gpu::copy(arguments, static_cast<F16*>(arguments.to), i, [](F16 value) { return to_f32(value); },
                [](float value) { return to_f16(value); });
  }
}

}  // namespace sluice::kernels
