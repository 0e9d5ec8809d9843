#include "optim/cuda/update.h"

#include "core/cuda/kernel.h"
#include "core/cuda/packed.h"
#include "core/random.h"

// Elementwise updates, with the bits of optim/update-inl.h: the arithmetic is the same header, and types,
// codes and random words mean the same. A thread has 8 consecutive elements, and a warp the 256 that share a
// scale.
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
  static __device__ __forceinline__ float min(float a, float b) { return a < b ? a : b; }
  static __device__ __forceinline__ float max(float a, float b) { return a > b ? a : b; }
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

constexpr int kOwn = 8;  // elements of a thread: those that one block of Philox serves
constexpr std::uint32_t kWarp = 32, kAll = 0xffffffffu;
static_assert(kOwn * kWarp == kScaleBlock);

// What a thread has of each array. Its elements beyond the end are zeros.
struct Own {
  float values[kOwn];
  __device__ __forceinline__ float& operator[](int i) { return values[i]; }
};
struct Element {
  float gradient, value, first, second;
};
struct Place {
  std::uint64_t begin;  // of the thread's elements
  int count;            // of them, up to kOwn
  std::uint64_t block;  // of the warp
};

template <class T>
__device__ __forceinline__ bool is_packed(const T* from, const Place& at) {
  return at.count == kOwn && sluice::is_packed<kOwn>(from + at.begin);
}

template <class T, class Widen>
__device__ __forceinline__ Own load(const T* from, const Place& at, Widen widen) {
  Own own{};
  if (is_packed(from, at)) {
    const auto all = *reinterpret_cast<const Packed<T, kOwn>*>(from + at.begin);
    for (int i = 0; i < kOwn; ++i) own[i] = widen(all.values[i]);
  } else {
    for (int i = 0; i < at.count; ++i) own[i] = widen(from[at.begin + static_cast<std::uint64_t>(i)]);
  }
  return own;
}
template <class T, class Narrow>
__device__ __forceinline__ void store(Own own, T* to, const Place& at, Narrow narrow) {
  if (is_packed(to, at)) {
    Packed<T, kOwn> all;
    for (int i = 0; i < kOwn; ++i) all.values[i] = narrow(own[i], i);
    *reinterpret_cast<Packed<T, kOwn>*>(to + at.begin) = all;
  } else {
    for (int i = 0; i < at.count; ++i) to[at.begin + static_cast<std::uint64_t>(i)] = narrow(own[i], i);
  }
}

__device__ __forceinline__ Own load_array(const void* from, Dtype type, const Place& at) {
  if (type == Dtype::kF32) return load(static_cast<const float*>(from), at, [](float value) { return value; });
  if (type == Dtype::kBf16) return load(static_cast<const Bf16*>(from), at, [](Bf16 value) { return to_f32(value); });
  return load(static_cast<const F16*>(from), at, [](F16 value) { return to_f32(value); });
}
__device__ __forceinline__ void store_array(Own own, void* to, Dtype type, const Place& at) {
  if (type == Dtype::kF32) return store(own, static_cast<float*>(to), at, [](float value, int) { return value; });
  if (type == Dtype::kBf16)
    return store(own, static_cast<Bf16*>(to), at, [](float value, int) { return to_bf16(value); });
  store(own, static_cast<F16*>(to), at, [](float value, int) { return to_f16(value); });
}

// State in codes: optim/eight_bit-inl.h.
template <CodeMap kMap>
__device__ __forceinline__ float decoded(const CodeLines& lines, std::uint8_t code, float scale) {
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

__device__ __forceinline__ float scale_of_warp(Own own, const Place& at) {
  float greatest = 0;
  std::uint32_t most = 0;
  for (int i = 0; i < at.count; ++i) {
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
__device__ __forceinline__ void store_codes(Own own, const GpuUpdate::State& state, const CodeLines& lines, const Place& at) {
  const float scale = scale_of_warp(own, at);
  if (threadIdx.x % kWarp == 0) state.scales[at.block] = scale;
  const bool is_zero = scale == 0, is_finite = Ops::abs(scale) <= std::numeric_limits<float>::max();
  const float inverse = is_zero ? 0 : Ops::div(1, Ops::abs(scale)), zero = Ops::with_sign(0, scale);
  float slopes[CodeTable::kLines];
  for (std::size_t i = 0; i < CodeTable::kLines; ++i) slopes[i] = Ops::mul(lines.inverse_slopes[i], inverse);
  store(own, static_cast<std::uint8_t*>(state.values), at, [&](float value, int) {
    constexpr std::uint8_t kOne = kMap == CodeMap::kSigned ? 128 : 255;
    if (is_zero) return std::uint8_t{0};
    if (!is_finite) return kOne;
    const float number = code_number<kMap, Ops>(value, slopes, lines.inverse_offsets, zero);
    return static_cast<std::uint8_t>(Ops::bits_of(Ops::add(number, 0x1.8p23f)));
  });
}

template <bool kCoded, CodeMap kMap>
__device__ __forceinline__ Own load_state(const GpuUpdate::State& state, const CodeLines& lines, const Place& at) {
  if constexpr (!kCoded) return load_array(state.values, state.type, at);
  const float scale = state.scales[at.block];
  return load(static_cast<const std::uint8_t*>(state.values), at,
              [&](std::uint8_t code) { return decoded<kMap>(lines, code, scale); });
}
template <bool kCoded, CodeMap kMap>
__device__ __forceinline__ void store_state(Own own, const GpuUpdate::State& state, const CodeLines& lines,
                                            const Place& at) {
  if constexpr (kCoded)
    store_codes<kMap>(own, state, lines, at);
  else
    store_array(own, state.values, state.type, at);
}

// bf16 without a master: 16 random bits are added to the lower 16, which are then cut off. NaN stays NaN.
__device__ __forceinline__ void store_rounded(Own own, const GpuUpdate& update, const Place& at) {
  const std::uint64_t block = (update.words.first_index + at.begin) / kOwn;
  const std::uint64_t stream = update.words.stream, seed = update.words.seed;
  const auto words = philox<kRoundingPhiloxRounds>(
      {static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32), static_cast<std::uint32_t>(stream),
       static_cast<std::uint32_t>(stream >> 32)},
      {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)});
  store(own, static_cast<Bf16*>(update.parameter), at, [&](float value, int i) {
    const std::uint32_t word = words[static_cast<std::size_t>(i / 2)];
    const std::uint32_t random = i % 2 == 0 ? word & 0xffffu : word >> 16;
    const std::uint32_t bits = Ops::bits_of(value);
    return Bf16{static_cast<std::uint16_t>((value != value ? bits : bits + random) >> 16)};
  });
}

// kArrays is the number of the optimizer's arrays of state. change(element) is its arithmetic.
template <int kArrays, bool kCoded, bool kMaster, class Change>
__device__ __forceinline__ void update(const GpuUpdate& u, const GradientRule& rule, Change change) {
  if (u.refused != nullptr && *u.refused != 0) return;  // all threads
  Place at;
  at.block = std::uint64_t{blockIdx.x} * (kGpuThreads / kWarp) + threadIdx.x / kWarp;
  at.begin = at.block * kScaleBlock + threadIdx.x % kWarp * kOwn;
  if (at.block * kScaleBlock >= u.count) return;  // the whole warp
  const std::uint64_t left = at.begin < u.count ? u.count - at.begin : 0;
  at.count = left < kOwn ? static_cast<int>(left) : kOwn;
  Own gradient = load_array(u.gradient, u.gradient_type, at);
  Own value = kMaster ? load_array(u.master, Dtype::kF32, at) : load_array(u.parameter, Dtype::kBf16, at);
  Own first{}, second{};
  if constexpr (kArrays > 0) first = load_state<kCoded, CodeMap::kSigned>(u.state[0], u.lines[0], at);
  if constexpr (kArrays > 1) second = load_state<kCoded, CodeMap::kUnsigned>(u.state[1], u.lines[1], at);
  for (int i = 0; i < kOwn; ++i) {
    Element e = {ruled<Ops>(rule, gradient[i]), value[i], first[i], second[i]};
    change(e);
    value[i] = e.value, first[i] = e.first, second[i] = e.second;
  }
  if constexpr (kArrays > 0) store_state<kCoded, CodeMap::kSigned>(first, u.state[0], u.lines[0], at);
  if constexpr (kArrays > 1) store_state<kCoded, CodeMap::kUnsigned>(second, u.state[1], u.lines[1], at);
  if constexpr (kMaster) {
    store_array(value, u.master, Dtype::kF32, at);
    if (u.parameter != nullptr) store_array(value, u.parameter, u.parameter_type, at);
  } else {
    store_rounded(value, u, at);
  }
}

}  // namespace gpu

// The last argument is the arithmetic, in the namespace gpu.
#define SLUICE_UPDATE(name, arrays, coded, master, factors, ...)                                        \
  SLUICE_KERNEL(name, GpuUpdate) {                                                                      \
    gpu::update<arrays, coded, master>(                                                                 \
        arguments, arguments.factors.gradient,                                                          \
        [&](gpu::Element& element) { gpu::__VA_ARGS__(arguments.factors, element); });                  \
  }
#define SLUICE_UPDATES(name, arrays, factors, ...)                                         \
  SLUICE_UPDATE(sluice_##name##_plain_master, arrays, false, true, factors, __VA_ARGS__)   \
  SLUICE_UPDATE(sluice_##name##_plain_rounded, arrays, false, false, factors, __VA_ARGS__) \
  SLUICE_UPDATE(sluice_##name##_coded_master, arrays, true, true, factors, __VA_ARGS__)    \
  SLUICE_UPDATE(sluice_##name##_coded_rounded, arrays, true, false, factors, __VA_ARGS__)

SLUICE_UPDATES(adamw, 2, adam, update_adam<true, gpu::Ops>)
SLUICE_UPDATES(adam, 2, adam, update_adam<false, gpu::Ops>)
SLUICE_UPDATES(lion, 1, lion, update_lion<gpu::Ops>)
SLUICE_UPDATES(sgd, 1, sgd, update_sgd<true, gpu::Ops>)
SLUICE_UPDATE(sluice_sgd_stateless_plain_master, 0, false, true, sgd, update_sgd<false, gpu::Ops>)
SLUICE_UPDATE(sluice_sgd_stateless_plain_rounded, 0, false, false, sgd, update_sgd<false, gpu::Ops>)

}  // namespace sluice::optim
