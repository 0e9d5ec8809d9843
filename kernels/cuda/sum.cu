#include "kernels/cuda/sum.h"

#include <bit>
#include <utility>

#include "core/cuda/kernel.h"
#include "core/cuda/packed.h"

// Adding and copying gradients in f32, with the bits of kernels/reduce.cc and kernels/elementwise.cc.
namespace sluice::kernels {
namespace gpu {

constexpr unsigned kWarp = 32;
template <class T>
using Own = Packed<T, kSumOwn>;

// The types of gradients.
struct OfF32 {
  using Type = float;
  static __device__ __forceinline__ float widen(float value) { return value; }
  static __device__ __forceinline__ float narrow(float value) { return value; }
};
struct OfBf16 {
  using Type = Bf16;
  static __device__ __forceinline__ float widen(Bf16 value) { return to_f32(value); }
  static __device__ __forceinline__ Bf16 narrow(float value) { return to_bf16(value); }
};
struct OfF16 {
  using Type = F16;
  static __device__ __forceinline__ float widen(F16 value) { return of_f16(value.bits); }
  static __device__ __forceinline__ F16 narrow(float value) { return to_f16(value); }
};

template <bool kWhole, class T, class Has>
__device__ __forceinline__ Own<T> load(const T* from, std::uint64_t first, Has has) {
  if constexpr (kWhole) return *reinterpret_cast<const Own<T>*>(from + first);
  Own<T> own{};
  SLUICE_UNROLL
  for (std::uint64_t i = 0; i < kSumOwn; ++i)
    if (has(first + i)) own.values[i] = from[first + i];
  return own;
}
template <bool kWhole, class T, class Has>
__device__ __forceinline__ void store(const Own<T>& own, T* to, std::uint64_t first, Has has) {
  if constexpr (kWhole) {
    *reinterpret_cast<Own<T>*>(to + first) = own;
  } else {
    SLUICE_UNROLL
    for (std::uint64_t i = 0; i < kSumOwn; ++i)
      if (has(first + i)) to[first + i] = own.values[i];
  }
}

// Adds a block of the grid. A thread has 4 elements in each of kPlaces places: so the threads of a warp
// access neighbouring memory, and read kTogether places before they write any. The new sums are also left in
// `results`, in f32, with zeros beyond the end.
constexpr int kPlaces = kGridBlock / (kWarp * kSumOwn);
template <bool kWhole, bool kAccumulate, bool kKeepsType, int kTogether, class T, class Widen>
__device__ __forceinline__ void add(const GpuAddition& a, const T* from, std::uint64_t begin, float* results, Widen widen) {
  constexpr std::uint64_t kStride = kWarp * kSumOwn;
  const auto has = [&](std::uint64_t i) { return kWhole || i < a.count; };
  SLUICE_NO_UNROLL
  for (int next = 0; next < kPlaces; next += kTogether) {
    const std::uint64_t offset = next * kStride, first = begin + offset;
    Own<T> values[kTogether] = {};
    Own<float> sums[kTogether] = {};
    SLUICE_UNROLL
    for (int i = 0; i < kTogether; ++i) values[i] = load<kWhole>(from, first + i * kStride, has);
    if constexpr (kAccumulate) {
      SLUICE_UNROLL
      for (int i = 0; i < kTogether; ++i) sums[i] = load<kWhole>(static_cast<const float*>(a.to), first + i * kStride, has);
    }
    SLUICE_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      SLUICE_UNROLL
      for (int element = 0; element < kSumOwn; ++element) {
        const float value = widen(values[i].values[element]);
        float& sum = sums[i].values[element];
        if (kAccumulate) sum = sum * a.factor + value;  // multiplying by a factor of 1 changes nothing
        if (!kAccumulate) sum = value;
        if (!has(first + i * kStride + element)) sum = 0;
      }
      if constexpr (kKeepsType)
        store<kWhole>(values[i], static_cast<T*>(a.to), first + i * kStride, has);
      else
        store<kWhole>(sums[i], static_cast<float*>(a.to), first + i * kStride, has);
      *reinterpret_cast<Own<float>*>(results + offset + i * kStride) = sums[i];
    }
  }
}

template <class T, class Widen>
__device__ __forceinline__ void add(const GpuAddition& a, const T* from, std::uint64_t begin, float* results, Widen widen) {
  const std::uint64_t end = (begin / kGridBlock + 1) * kGridBlock;
  const bool to_packed = a.keeps_type ? is_packed<kSumOwn>(static_cast<const T*>(a.to))
                                      : is_packed<kSumOwn>(static_cast<const float*>(a.to));
  const bool is_whole = is_packed<kSumOwn>(from) && to_packed && end <= a.count;
  if (a.keeps_type && is_whole) return add<true, false, true, kPlaces>(a, from, begin, results, widen);
  if (a.keeps_type) return add<false, false, true, 1>(a, from, begin, results, widen);
  if (is_whole && a.accumulate) return add<true, true, false, kPlaces / 2>(a, from, begin, results, widen);
  if (is_whole) return add<true, false, false, kPlaces>(a, from, begin, results, widen);
  if (a.accumulate) return add<false, true, false, 1>(a, from, begin, results, widen);
  return add<false, false, false, 1>(a, from, begin, results, widen);
}

__device__ __forceinline__ void add(const GpuAddition& a, std::uint64_t begin, float* results) {
  if (a.type == Dtype::kF32)
    return add(a, static_cast<const float*>(a.from), begin, results, [](float value) { return OfF32::widen(value); });
  if (a.type == Dtype::kBf16)
    return add(a, static_cast<const Bf16*>(a.from), begin, results, [](Bf16 value) { return OfBf16::widen(value); });
  return add(a, static_cast<const F16*>(a.from), begin, results, [](F16 value) { return OfF16::widen(value); });
}

// A thread's elements of kTogether places, in f32.
template <int kTogether>
struct Places {
  Own<float> at[kTogether];
};
template <int kTogether>
__device__ __forceinline__ void add_to(Places<kTogether>& lower, const Places<kTogether>& upper) {
  SLUICE_UNROLL
  for (int i = 0; i < kTogether; ++i) {
    SLUICE_UNROLL
    for (int element = 0; element < kSumOwn; ++element) lower.at[i].values[element] += upper.at[i].values[element];
  }
}

// Computes the mean over ranks of a thread's elements of a block of the grid, laid out as in add(). Where two
// neighbouring ranks have the same type, both are read before either is used.
template <bool kWhole, int kTogether>
class Mean {
 public:
  __device__ __forceinline__ Mean(const GpuMean& mean, std::uint64_t begin) : mean_(mean), begin_(begin) {}
  __device__ __forceinline__ void store(float* results) const {
    SLUICE_NO_UNROLL
    for (int next = 0; next < kPlaces; next += kTogether) {
      const std::uint64_t offset = next * kStride;
      const Places<kTogether> sums = sums_of(begin_ + offset, std::make_integer_sequence<int, kMostMeanRanks / 2>());
      SLUICE_UNROLL
      for (int i = 0; i < kTogether; ++i) {
        const std::uint64_t first = begin_ + offset + i * kStride;
        Own<float> means;
        SLUICE_UNROLL
        for (int element = 0; element < kSumOwn; ++element)
          means.values[element] = has()(first + element) ? sums.at[i].values[element] * mean_.factor : 0;
        gpu::store<kWhole>(means, mean_.to, first, has());
        *reinterpret_cast<Own<float>*>(results + offset + i * kStride) = means;
      }
    }
  }

 private:
  static constexpr std::uint64_t kStride = kWarp * kSumOwn;

  __device__ __forceinline__ auto has() const {
    return [count = mean_.count](std::uint64_t i) { return kWhole || i < count; };
  }
  template <class Of>
  __device__ __forceinline__ Places<kTogether> read(int rank, std::uint64_t first, Of) const {
    const auto* const from = static_cast<const typename Of::Type*>(mean_.of_ranks[rank]);
    Own<typename Of::Type> values[kTogether];
    SLUICE_UNROLL
    for (int i = 0; i < kTogether; ++i) values[i] = load<kWhole>(from, first + i * kStride, has());
    Places<kTogether> wide;
    SLUICE_UNROLL
    for (int i = 0; i < kTogether; ++i) {
      SLUICE_UNROLL
      for (int element = 0; element < kSumOwn; ++element)
        wide.at[i].values[element] = Of::widen(values[i].values[element]);
    }
    return wide;
  }
  // Calls use() with OfF32 or another type, for a rank's type.
  template <class Use>
  __device__ __forceinline__ void with_type(int rank, Use use) const {
    if (mean_.types[rank] == Dtype::kF32) use(OfF32());
    if (mean_.types[rank] == Dtype::kBf16) use(OfBf16());
    if (mean_.types[rank] == Dtype::kF16) use(OfF16());
  }

  // Pushes the sums of pairs of ranks onto a stack, whose height is known at compile time.
  template <int... kPairs>
  __device__ __forceinline__ Places<kTogether> sums_of(std::uint64_t first, std::integer_sequence<int, kPairs...>) const {
    Places<kTogether> stack[kMostHeight];
    (void)(push<kPairs>(first, stack) && ...);
    return stack[0];
  }
  static constexpr int kMostHeight = std::popcount(unsigned{kMostMeanRanks / 2 - 1}) + 1;
  // Pushes a pair's sum. Returns whether there is another pair.
  template <int kPair>
  __device__ __forceinline__ bool push(std::uint64_t first, Places<kTogether> (&stack)[kMostHeight]) const {
    constexpr int kRank = 2 * kPair, kHeight = std::popcount(unsigned{kPair}), kMerges = std::countr_one(unsigned{kPair});
    const bool is_last = mean_.ranks <= kRank + 2;
    const bool is_pair = mean_.ranks > kRank + 1;
    Places<kTogether>& sum = stack[kHeight];
    if (is_pair && mean_.types[kRank] == mean_.types[kRank + 1]) {
      with_type(kRank, [&](auto of) {
        sum = read(kRank, first, of);
        add_to(sum, read(kRank + 1, first, of));
      });
    } else {
      with_type(kRank, [&](auto of) { sum = read(kRank, first, of); });
      if (is_pair) with_type(kRank + 1, [&](auto of) { add_to(sum, read(kRank + 1, first, of)); });
    }
    SLUICE_UNROLL
    for (int merge = 0; merge < kHeight; ++merge)
      if (merge < kMerges || is_last) add_to(stack[kHeight - merge - 1], stack[kHeight - merge]);
    return !is_last;
  }

  const GpuMean& mean_;
  const std::uint64_t begin_;
};

__device__ __forceinline__ void mean(const GpuMean& m, std::uint64_t begin, float* results) {
  if (m.is_packed && (begin / kGridBlock + 1) * kGridBlock <= m.count)
    Mean<true, kPlaces / 2>(m, begin).store(results);
  else
    Mean<false, 1>(m, begin).store(results);
}

// A thread block handles kAddElements, of which each warp stores a block of the grid: fill(first element,
// results) also leaves them in f32 in shared memory. Their squares are summed there in kSumLanes lanes, each
// in ascending order, and lanes are added pairwise, neighbours first.
template <class Fill>
__device__ __forceinline__ void store_with_squares(std::uint64_t count, double* squares, Fill fill) {
  constexpr unsigned kBlocks = kAddThreads / kWarp;  // of the grid
  // Padded, so that two blocks' lanes are in different shared-memory banks.
  constexpr unsigned kRow = kGridBlock + kSumLanes;
  __shared__ Own<float> shared[kBlocks * kRow / kSumOwn];
  float* const results = shared[0].values;
  const std::uint64_t first = blockIdx.x * std::uint64_t{kBlocks};
  const unsigned own = threadIdx.x / kWarp, at = threadIdx.x % kWarp * kSumOwn;
  fill((first + own) * kGridBlock + at, results + own * kRow + at);
  __syncthreads();
  if (threadIdx.x >= kBlocks * kSumLanes) return;  // ends whole warps
  const unsigned summed = threadIdx.x / kSumLanes, lane = threadIdx.x % kSumLanes;
  double sum = 0;
  for (unsigned i = lane; i < kGridBlock; i += kSumLanes) {
    const double value = results[summed * kRow + i];
    sum = __fma_rn(value, value, sum);
  }
  // Two partner threads both add the same two numbers. All threads of a warp take part.
  for (unsigned threads = 1; threads < kSumLanes; threads *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, threads);
  if (lane == 0 && (first + summed) * kGridBlock < count) squares[first + summed] = sum;
}

// Stores a thread's elements: a value is converted to the type, multiplied, and converted again. All are read
// before the first is written, since source and destination of one thread may overlap.
template <bool kWhole, class From, class To>
__device__ __forceinline__ void copy(const GpuScaledCopy& c, std::uint64_t begin) {
  const auto* const from = static_cast<const typename From::Type*>(c.from);
  auto* const to = static_cast<typename To::Type*>(c.to);
  constexpr std::uint64_t kStride = kCopyThreads * kSumOwn;
  const auto has = [&](std::uint64_t i) { return kWhole || i < c.count; };
  Own<typename From::Type> values[kCopyPlaces];
  SLUICE_UNROLL
  for (int place = 0; place < kCopyPlaces; ++place) values[place] = load<kWhole>(from, begin + place * kStride, has);
  SLUICE_UNROLL
  for (int place = 0; place < kCopyPlaces; ++place) {
    Own<typename To::Type> stored;
    SLUICE_UNROLL
    for (int i = 0; i < kSumOwn; ++i) {
      const typename To::Type kept = To::narrow(From::widen(values[place].values[i]));
      stored.values[i] = c.factor == 1 ? kept : To::narrow(To::widen(kept) * c.factor);
    }
    store<kWhole>(stored, to, begin + place * kStride, has);
  }
}
template <class From, class To>
__device__ __forceinline__ void copy(const GpuScaledCopy& c) {
  const std::uint64_t of_block = blockIdx.x * std::uint64_t{kCopyElements}, begin = of_block + threadIdx.x * kSumOwn;
  if (is_packed<kSumOwn>(static_cast<const typename From::Type*>(c.from)) &&
      is_packed<kSumOwn>(static_cast<const typename To::Type*>(c.to)) && c.count >= of_block + kCopyElements)
    copy<true, From, To>(c, begin);
  else
    copy<false, From, To>(c, begin);
}
template <class From>
__device__ __forceinline__ void copy(const GpuScaledCopy& c) {
  if (c.type == Dtype::kF32) copy<From, OfF32>(c);
  if (c.type == Dtype::kBf16) copy<From, OfBf16>(c);
  if (c.type == Dtype::kF16) copy<From, OfF16>(c);
}

}  // namespace gpu

SLUICE_KERNEL(sluice_add, GpuAddition) {
  gpu::store_with_squares(arguments.count, arguments.squares,
                          [&](std::uint64_t begin, float* results) { gpu::add(arguments, begin, results); });
}

SLUICE_KERNEL(sluice_mean, GpuMean) {
  gpu::store_with_squares(arguments.count, arguments.squares,
                          [&](std::uint64_t begin, float* results) { gpu::mean(arguments, begin, results); });
}

SLUICE_KERNEL(sluice_scaled_copy, GpuScaledCopy) {
  if (arguments.from_type == Dtype::kF32) gpu::copy<gpu::OfF32>(arguments);
  if (arguments.from_type == Dtype::kBf16) gpu::copy<gpu::OfBf16>(arguments);
  if (arguments.from_type == Dtype::kF16) gpu::copy<gpu::OfF16>(arguments);
}

}  // namespace sluice::kernels
