#include "optim/cuda/update.h"

#include "core/cuda/kernel.h"
#include "core/cuda/packed.h"
#include "core/random.h"

// Elementwise updates, with the bits of optim/update-inl.h: the arithmetic is the same header, and types,
// codes and random words are defined alike. A warp updates the 256 elements of one scale, and a thread two
// groups of 4 of them, half of the 256 apart: so the threads of a warp access neighbouring memory, 16 bytes
// of f32 each, and all arrays are loaded before anything is computed.
namespace sluice::optim {
namespace gpu {

struct Ops {
  using V = float;
  static __device__ __forceinline__ float set(float value) { return value; }
  static __device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
  static __device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
  static __device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
  static __device__ __forceinline__ float div(float a, float b) { return __fdiv_rn(a, b); }
  static __device__ __forceinline__ float root(float a) { return __fsqrt_rn(a); }
  static __device__ __forceinline__ float mul_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  static __device__ __forceinline__ bool greater(float a, float b) { return a > b; }
  static __device__ __forceinline__ float choose(bool is, float yes, float no) { return is ? yes : no; }
  // Single instructions. They differ from the CPU's for NaN and in the sign of 0, on which no code and no
  // scale depends.
  static __device__ __forceinline__ float min(float a, float b) { return fminf(a, b); }
  static __device__ __forceinline__ float max(float a, float b) { return fmaxf(a, b); }
  static __device__ __forceinline__ float abs(float a) { return from_bits(bits_of(a) & 0x7fffffffu); }
  static __device__ __forceinline__ float turn(float value, float zero) {
    return from_bits(bits_of(value) ^ bits_of(zero));
  }
  static __device__ __forceinline__ float with_sign(float magnitude, float value) {
    return from_bits(bits_of(magnitude) | (bits_of(value) & 0x80000000u));
  }
  static __device__ __forceinline__ std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
  static __device__ __forceinline__ float from_bits(std::uint32_t bits) { return std::bit_cast<float>(bits); }
};

#define SLUICE_ARITHMETIC __device__ __forceinline__
#define SLUICE_UNROLL_LINES SLUICE_UNROLL
#include "optim/arithmetic-inl.h"


constexpr int kGroup = 4, kGroups = 2, kOwn = kGroup * kGroups;
constexpr std::uint32_t kWarp = 32, kAll = 0xffffffffu;
constexpr std::uint64_t kStride = kGroup * kWarp;  // between the two groups of a thread
static_assert(kOwn * kWarp == kScaleBlock);

// A thread's elements of an array. Elements beyond the end are zeros.
struct Own {
  float values[kOwn];
  __device__ __forceinline__ float& operator[](int i) { return values[i]; }
  __device__ __forceinline__ float operator[](int i) const { return values[i]; }
};
struct Element {
  float gradient, value, first, second;
};
// kWhole: the warp has all 256 elements, and every array may be accessed by groups.
template <bool kWhole>
struct Place {
  std::uint64_t block;  // of the warp
  std::uint64_t begin;  // of the thread's first group
  std::uint64_t count;  // of the span
  __device__ __forceinline__ bool has(int i) const {
    return kWhole || begin + static_cast<std::uint64_t>(i / kGroup) * kStride + i % kGroup < count;
  }
};

// A group as stored in memory: a word for each byte of an element.
struct Group {
  std::uint32_t words[kGroup];
};
struct Stored {
  Group groups[kGroups];
};
template <int kBytes>
__device__ __forceinline__ Group load_group(const std::byte* from) {
  const auto all = *reinterpret_cast<const Packed<std::uint32_t, kBytes>*>(from);
  Group group{};
  SLUICE_UNROLL
  for (int i = 0; i < kBytes; ++i) group.words[i] = all.values[i];
  return group;
}
template <int kBytes>
__device__ __forceinline__ void store_group(const Group& group, std::byte* to) {
  Packed<std::uint32_t, kBytes> all;
  SLUICE_UNROLL
  for (int i = 0; i < kBytes; ++i) all.values[i] = group.words[i];
  *reinterpret_cast<Packed<std::uint32_t, kBytes>*>(to) = all;
}
template <class T>
__device__ __forceinline__ void put(Group& group, int i, T value) {
  constexpr int kEach = 4 / sizeof(T);
  group.words[i / kEach] |= std::uint32_t{value} << i % kEach * 8 * sizeof(T);
}
template <class T>
__device__ __forceinline__ T get(const Group& group, int i) {
  constexpr int kEach = 4 / sizeof(T);
  return static_cast<T>(group.words[i / kEach] >> i % kEach * 8 * sizeof(T));
}

// `bytes` is the size of an element.
template <bool kWhole>
__device__ __forceinline__ Stored load(const void* from, int bytes, const Place<kWhole>& at) {
  Stored stored{};
  SLUICE_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    const std::uint64_t first = at.begin + static_cast<std::uint64_t>(g) * kStride;
    Group& group = stored.groups[g];
    if constexpr (kWhole) {
      const std::byte* const begin = static_cast<const std::byte*>(from) + first * static_cast<std::uint64_t>(bytes);
      group = bytes == 4 ? load_group<4>(begin) : bytes == 2 ? load_group<2>(begin) : load_group<1>(begin);
    } else {
      SLUICE_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        if (!at.has(g * kGroup + i)) continue;
        const std::uint64_t element = first + static_cast<std::uint64_t>(i);
        if (bytes == 4) group.words[i] = static_cast<const std::uint32_t*>(from)[element];
        if (bytes == 2) put(group, i, static_cast<const std::uint16_t*>(from)[element]);
        if (bytes == 1) put(group, i, static_cast<const std::uint8_t*>(from)[element]);
      }
    }
  }
  return stored;
}
template <bool kWhole>
__device__ __forceinline__ void store(const Stored& stored, void* to, int bytes, const Place<kWhole>& at) {
  SLUICE_UNROLL
  for (int g = 0; g < kGroups; ++g) {
    const std::uint64_t first = at.begin + static_cast<std::uint64_t>(g) * kStride;
    const Group& group = stored.groups[g];
    if constexpr (kWhole) {
      std::byte* const begin = static_cast<std::byte*>(to) + first * static_cast<std::uint64_t>(bytes);
      if (bytes == 4) store_group<4>(group, begin);
      if (bytes == 2) store_group<2>(group, begin);
      if (bytes == 1) store_group<1>(group, begin);
    } else {
      SLUICE_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        if (!at.has(g * kGroup + i)) continue;
        const std::uint64_t element = first + static_cast<std::uint64_t>(i);
        if (bytes == 4) static_cast<std::uint32_t*>(to)[element] = group.words[i];
        if (bytes == 2) static_cast<std::uint16_t*>(to)[element] = get<std::uint16_t>(group, i);
        if (bytes == 1) static_cast<std::uint8_t*>(to)[element] = get<std::uint8_t>(group, i);
      }
    }
  }
}

// Calls body(group, i, own) for each element i of a group; `own` is its index in the thread.
template <class GroupOrConst, class StoredOrConst, class Body>
__device__ __forceinline__ void for_each(StoredOrConst& stored, Body body) {
  SLUICE_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    GroupOrConst& group = stored.groups[i / kGroup];
    body(group, i % kGroup, i);
  }
}
template <class Widen>
__device__ __forceinline__ Own widened(const Stored& stored, Widen widen) {
  Own own;
  for_each<const Group>(stored, [&](const Group& group, int i, int of_thread) { own[of_thread] = widen(group, i); });
  return own;
}
__device__ __forceinline__ Own floats(const Stored& stored, Dtype type) {
  if (type == Dtype::kF32)
    return widened(stored, [](const Group& group, int i) { return Ops::from_bits(group.words[i]); });
  if (type == Dtype::kBf16)
    return widened(stored, [](const Group& group, int i) { return to_f32(Bf16{get<std::uint16_t>(group, i)}); });
  return widened(stored, [](const Group& group, int i) { return of_f16(get<std::uint16_t>(group, i)); });
}
__device__ __forceinline__ Stored stored_as(const Own& own, Dtype type) {
  Stored stored{};
  SLUICE_UNROLL
  for (int i = 0; i < kOwn; i += 2) {
    Group& group = stored.groups[i / kGroup];
    const int word = i % kGroup;
    if (type == Dtype::kF32) {
      group.words[word] = Ops::bits_of(own[i]);
      group.words[word + 1] = Ops::bits_of(own[i + 1]);
    } else {
      group.words[word / 2] = type == Dtype::kBf16 ? two_bf16(own[i], own[i + 1]) : two_f16(own[i], own[i + 1]);
    }
  }
  return stored;
}

// State in codes: optim/eight_bit-inl.h. The lines for decoding are in shared memory, since neighbouring
// threads look up different ones.
struct DecodeLines {
  float slopes[8], offsets[8];
};
template <CodeMap kMap>
__device__ __forceinline__ float decoded(const DecodeLines& lines, std::uint8_t code, float scale) {
  const float number = kMap == CodeMap::kSigned ? static_cast<float>(static_cast<std::int8_t>(code))
                                                : static_cast<float>(code + 1);
  const std::uint32_t line = Ops::bits_of(number) >> 23 & 7;
  float offset = lines.offsets[line];
  if constexpr (kMap == CodeMap::kSigned) {
    if (number == 0) return Ops::mul(0, scale);
    offset = Ops::turn(offset, Ops::with_sign(0, number));
  }
  return Ops::mul(Ops::mul_add(number, lines.slopes[line], offset), scale);
}

template <bool kWhole>
__device__ __forceinline__ float scale_of_warp(const Own& own, const Place<kWhole>& at) {
  float greatest = 0;
  std::uint32_t most = 0;
  SLUICE_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    if (!at.has(i)) continue;
    greatest = Ops::max(greatest, own[i]);
    const std::uint32_t magnitude = Ops::bits_of(own[i]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  for (std::uint32_t lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    greatest = Ops::max(greatest, __shfl_xor_sync(kAll, greatest, lanes));
    const std::uint32_t other = __shfl_xor_sync(kAll, most, lanes);
    most = other > most ? other : most;
  }
  return scale_of_block(Ops::from_bits(most), greatest);
}

template <CodeMap kMap>
__device__ __forceinline__ Stored encoded(const Own& own, const CodeLines& lines, float scale) {
  const bool is_zero = scale == 0, is_finite = Ops::abs(scale) <= std::numeric_limits<float>::max();
  const float inverse = is_zero ? 0 : Ops::div(1, Ops::abs(scale)), zero = Ops::with_sign(0, scale);
  float slopes[CodeTable::kLines];
  SLUICE_UNROLL
  for (std::size_t i = 0; i < CodeTable::kLines; ++i) slopes[i] = Ops::mul(lines.inverse_slopes[i], inverse);
  constexpr std::uint8_t kOne = kMap == CodeMap::kSigned ? 128 : 255;
  Stored stored{};
  SLUICE_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    const float number = code_number<kMap, Ops>(own[i], slopes, lines.inverse_offsets, zero);
    const auto code = static_cast<std::uint8_t>(Ops::bits_of(Ops::add(number, 0x1.8p23f)));
    put(stored.groups[i / kGroup], i % kGroup, is_zero ? std::uint8_t{0} : !is_finite ? kOne : code);
  }
  return stored;
}

// bf16 without a master, rounded stochastically: 16 random bits are added to the lower 16, which are then cut
// off. NaN stays NaN. Of two neighbouring threads one computes the words of both for the first groups, and
// the other for the second ones.
template <class Span, bool kWhole>
__device__ __forceinline__ Stored rounded(const Own& own, std::uint64_t seed, const Span& span,
                                          const Place<kWhole>& at) {
  constexpr std::uint64_t kOfWords = 8;  // elements per Philox block
  const bool is_second = threadIdx.x % 2 != 0;
  const std::uint64_t first = span.first_index + at.begin + (is_second ? kStride : 0);
  const std::uint64_t block = first / kOfWords, stream = span.stream;
  const auto made = philox<kRoundingPhiloxRounds>(
      {static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), static_cast<std::uint32_t>(stream),
       static_cast<std::uint32_t>(stream >> 32)},
      {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  Stored stored{};
  SLUICE_UNROLL
  for (int i = 0; i < kGroup; i += 2) {
    const std::uint32_t kept = is_second ? made[2 + i / 2] : made[i / 2];
    const std::uint32_t got = __shfl_xor_sync(kAll, is_second ? made[i / 2] : made[2 + i / 2], 1);
    SLUICE_UNROLL
    for (int g = 0; g < kGroups; ++g) {
      const std::uint32_t word = is_second == (g == 1) ? kept : got;
      const float low = own[g * kGroup + i], high = own[g * kGroup + i + 1];
      const std::uint32_t low_bits = Ops::bits_of(low), high_bits = Ops::bits_of(high);
      stored.groups[g].words[i / 2] = (low != low ? low_bits : low_bits + (word & 0xffffu)) >> 16 |
                                      ((high != high ? high_bits : high_bits + (word >> 16)) & 0xffff0000u);
    }
  }
  return stored;
}

// Copies to registers. The compiler would reload a kernel's arguments for each element.
template <class Factors>
__device__ __forceinline__ Factors in_registers(const Factors& given) {
  struct Words {
    std::uint32_t words[sizeof(Factors) / sizeof(std::uint32_t)];
  };
  Words all = std::bit_cast<Words>(given);
#ifdef __CUDACC__
  SLUICE_UNROLL
  for (std::uint32_t& word : all.words) asm volatile("" : "+r"(word));
#endif
  return std::bit_cast<Factors>(all);
}

// Updates a warp's elements. `change` is the optimizer's arithmetic, and `lines` are for arrays in codes.
template <int kArrays, bool kCoded, bool kMaster, bool kWhole, class Updates, class Span, class Change>
__device__ __forceinline__ void update_warp(const Updates& u, const Span& span, const Place<kWhole>& at,
                                            int gradient_bytes, int state_bytes, const DecodeLines* lines, Change change) {
  const Stored gradients = load(span.gradient, gradient_bytes, at);
  const Stored values = kMaster ? load(span.master, 4, at) : load(span.parameter, 2, at);
  Stored states[2];
  float scales[2] = {};
  SLUICE_UNROLL
  for (int a = 0; a < kArrays; ++a) {
    states[a] = load(span.state[a].values, state_bytes, at);
    if constexpr (kCoded) scales[a] = span.state[a].scales[at.block];
  }
  Own gradient = floats(gradients, u.gradient_type);
  Own value = floats(values, kMaster ? Dtype::kF32 : Dtype::kBf16), first{}, second{};
  const auto state_of = [&](int a, auto decode) {
    if constexpr (kCoded)
      return widened(states[a], [&](const Group& group, int i) { return decode(get<std::uint8_t>(group, i)); });
    else
      return floats(states[a], state_bytes == 4 ? Dtype::kF32 : Dtype::kBf16);
  };
  if constexpr (kArrays > 0)
    first = state_of(0, [&](std::uint8_t code) { return decoded<CodeMap::kSigned>(lines[0], code, scales[0]); });
  if constexpr (kArrays > 1)
    second = state_of(1, [&](std::uint8_t code) { return decoded<CodeMap::kUnsigned>(lines[1], code, scales[1]); });
  const auto factors = in_registers(span.factors);
  SLUICE_UNROLL
  for (int i = 0; i < kOwn; ++i) gradient[i] = Ops::mul(gradient[i], factors.gradient.factor);
  if (factors.gradient.clips()) {
    SLUICE_UNROLL
    for (int i = 0; i < kOwn; ++i) gradient[i] = clipped<Ops>(factors.gradient, gradient[i]);
  }
  SLUICE_UNROLL
  for (int i = 0; i < kOwn; ++i) {
    Element e = {gradient[i], value[i], first[i], second[i]};
    change(factors, e);
    value[i] = e.value, first[i] = e.first, second[i] = e.second;
  }
  const auto store_state = [&](int a, const Own& own, auto encode) {
    if constexpr (kCoded) {
      const float scale = scale_of_warp(own, at);
      if (threadIdx.x % kWarp == 0) span.state[a].scales[at.block] = scale;
      store(encode(scale), span.state[a].values, 1, at);
    } else {
      store(stored_as(own, state_bytes == 4 ? Dtype::kF32 : Dtype::kBf16), span.state[a].values, state_bytes, at);
    }
  };
  if constexpr (kArrays > 0)
    store_state(0, first, [&](float scale) { return encoded<CodeMap::kSigned>(first, u.lines[0], scale); });
  if constexpr (kArrays > 1)
    store_state(1, second, [&](float scale) { return encoded<CodeMap::kUnsigned>(second, u.lines[1], scale); });
  if constexpr (!kMaster) {
    store(rounded(value, u.seed, span, at), span.parameter, 2, at);
  } else {
    store(stored_as(value, Dtype::kF32), span.master, 4, at);
    if (span.parameter == nullptr) return;
    if (u.parameter_type == Dtype::kF32)
      store(stored_as(value, Dtype::kF32), span.parameter, 4, at);
    else
      store(stored_as(value, u.parameter_type), span.parameter, 2, at);
  }
}

// Returns the span that a block of the grid works on.
template <class Updates>
__device__ __forceinline__ std::uint32_t span_of(const Updates& u, std::uint32_t block) {
  std::uint32_t first = 0;  // all earlier spans end at or before the block
  SLUICE_UNROLL
  for (std::uint32_t next = std::bit_ceil(kSpansOfLaunch) / 2; next > 0; next /= 2)
    if (first + next <= u.count - 1 && u.ends[first + next - 1] <= block) first += next;
  return first;
}

// kArrays is the number of the optimizer's state arrays.
template <int kArrays, bool kCoded, bool kMaster, class Updates, class Change>
__device__ __forceinline__ void update(const Updates& u, Change change) {
  if (u.refused != nullptr && *u.refused != 0) return;  // for all threads
  const DecodeLines* lines = nullptr;
  if constexpr (kCoded) {
    __shared__ DecodeLines shared[2];
    const std::uint32_t line = threadIdx.x % 8, array = threadIdx.x / 8;
    if (array < 2) {
      shared[array].slopes[line] = u.lines[array].slopes[line];
      shared[array].offsets[line] = u.lines[array].offsets[line];
    }
    __syncthreads();
    lines = shared;
  }
  const std::uint32_t i = span_of(u, blockIdx.x);
  const auto& span = u.spans[i];
  const std::uint64_t block = (blockIdx.x - (i == 0 ? 0 : u.ends[i - 1])) * std::uint64_t{kGpuThreads / kWarp} +
                              threadIdx.x / kWarp;
  const std::uint64_t begin = block * kScaleBlock + threadIdx.x % kWarp * kGroup;
  if (block * kScaleBlock >= span.count) return;  // for the whole warp
  const int gradient_bytes = u.gradient_type == Dtype::kF32 ? 4 : 2;
  const int state_bytes = kCoded ? 1 : u.state_type == Dtype::kF32 ? 4 : 2;
  const auto with = [&](auto place, int of_gradient, int of_state) {
    update_warp<kArrays, kCoded, kMaster>(u, span, place, of_gradient, of_state, lines, change);
  };
  const Place<true> whole{block, begin, span.count};
  if (!span.is_aligned || (block + 1) * kScaleBlock > span.count)
    with(Place<false>{block, begin, span.count}, gradient_bytes, state_bytes);
  else if (kCoded || kArrays == 0)
    gradient_bytes == 4 ? with(whole, 4, 1) : with(whole, 2, 1);
  else if (state_bytes == 4)
    gradient_bytes == 4 ? with(whole, 4, 4) : with(whole, 2, 4);
  else
    gradient_bytes == 4 ? with(whole, 4, 2) : with(whole, 2, 2);
}

}  // namespace gpu

// The last argument is the arithmetic, in the namespace gpu.
#define SLUICE_UPDATE(name, arrays, coded, master, factors, ...)                                            \
  SLUICE_KERNEL(name, GpuUpdates<factors>) {                                                                \
    gpu::update<arrays, coded, master>(                                                                     \
        arguments, [](const factors& of, gpu::Element& element) { gpu::__VA_ARGS__(of, element); });        \
  }
#define SLUICE_UPDATES(name, arrays, factors, ...)                                         \
  SLUICE_UPDATE(sluice_##name##_plain_master, arrays, false, true, factors, __VA_ARGS__)   \
  SLUICE_UPDATE(sluice_##name##_plain_rounded, arrays, false, false, factors, __VA_ARGS__) \
  SLUICE_UPDATE(sluice_##name##_coded_master, arrays, true, true, factors, __VA_ARGS__)    \
  SLUICE_UPDATE(sluice_##name##_coded_rounded, arrays, true, false, factors, __VA_ARGS__)

SLUICE_UPDATES(adam, 2, AdamFactors, update_adam<gpu::Ops>)
SLUICE_UPDATES(lion, 1, LionFactors, update_lion<gpu::Ops>)
SLUICE_UPDATES(sgd, 1, SgdFactors, update_sgd<true, gpu::Ops>)
SLUICE_UPDATE(sluice_sgd_stateless_plain_master, 0, false, true, SgdFactors, update_sgd<false, gpu::Ops>)
SLUICE_UPDATE(sluice_sgd_stateless_plain_rounded, 0, false, false, SgdFactors, update_sgd<false, gpu::Ops>)

}  // namespace sluice::optim
