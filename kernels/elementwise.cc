#include "kernels/elementwise.h"

#include <algorithm>

#include "kernels/simd.h"

#include "kernels/simd-inl.h"
#include "kernels/simd_math-inl.h"
#include "kernels/simd_random-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

// Reads each vector before it writes over it; so a narrower `to` may begin at the beginning of `from`.
void convert_range(std::size_t n, ConstArray from, Array to) {
  for_each_vector(n, [=](auto at) HWY_ATTR { store(load(from, at), to, at); });
}
void convert_past_caches_range(std::size_t n, ConstArray from, Array to) {
  if (!stores_past_caches(to) || to.data == from.data) return convert_range(n, from, to);
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    ask_ahead(from, i);
    store_past_caches(load(from, Whole{i}), to, Whole{i});
  }
  if (i < n) store(load(from, Part{i, n - i}), to, Part{i, n - i});
  hwy::FlushStream();
}
// Reads each vector before it writes over it; so `to` may begin at the beginning of `from`.
void narrow_range(std::size_t n, const float* from, Array to) {
  for_each_vector(n, [=](auto at) HWY_ATTR { store(load(from, at), to, at); });
}
void fill_range(std::size_t n, float value, Array to) {
  for_each_vector(n, [=](auto at) HWY_ATTR { store(set(value), to, at); });
}
void add_range(std::size_t n, ConstArray a, ConstArray b, Array sum) {
  for_each_vector(n, [=](auto at) HWY_ATTR { store(hn::Add(load(a, at), load(b, at)), sum, at); });
}
void scale_range(std::size_t n, float factor, Array x) {
  for_each_vector(n, [=](auto at) HWY_ATTR { store(hn::Mul(load(x, at), set(factor)), x, at); });
}

// 0.5 (1 + tanh(u)) = sigmoid(2 u). Beyond 15 the sigmoid is 0 or 1 to the last bit, so the argument is
// clamped; otherwise infinity would be multiplied by zero.
inline constexpr float kGeluLimit = 15.0f;
inline constexpr float kGeluLinear = 1.5957691216057308f;  // 2 sqrt(2 / pi)
inline constexpr float kGeluCubic = 0.07135481282052628f;  // 0.044715 * kGeluLinear

HWY_INLINE Sigmoid gelu_sigmoid(F32Vector limited) {
  const auto square = hn::Mul(limited, limited);
  return sigmoid(hn::Mul(limited, mul_add(square, set(kGeluCubic), set(kGeluLinear))));
}

void gelu_forward_range(std::size_t n, ConstArray x, Array y) {
  for_each_vector(n, [=](auto at) HWY_ATTR {
    const auto value = load(x, at);
    const auto raised = hn::IfThenElse(hn::Lt(value, set(-kGeluLimit)), set(-kGeluLimit), value);
    const auto gate = gelu_sigmoid(clamp(value, -kGeluLimit, kGeluLimit)).positive;
    store(hn::Mul(raised, gate), y, at);
  });
}

// With z(x) = 2 u: y' = s + x s (1 - s) z', z' = linear + 3 cubic x^2.
void gelu_backward_range(std::size_t n, ConstArray x, ConstArray dy, Array dx) {
  for_each_vector(n, [=](auto at) HWY_ATTR {
    const auto value = clamp(load(x, at), -kGeluLimit, kGeluLimit);
    const auto gate = gelu_sigmoid(value);
    const auto slope = mul_add(hn::Mul(value, value), set(3 * kGeluCubic), set(kGeluLinear));
    const auto change = hn::Mul(hn::Mul(gate.positive, gate.negative), slope);
    store(hn::Mul(load(dy, at), mul_add(value, change, gate.positive)), dx, at);
  });
}

// Beyond this limit sigmoid(-x) is zero.
inline constexpr float kSiluLimit = 120.0f;

void swiglu_forward_range(std::size_t n, ConstArray gate, ConstArray up, Array y) {
  for_each_vector(n, [=](auto at) HWY_ATTR {
    const auto value = load(gate, at);
    const auto raised = hn::IfThenElse(hn::Lt(value, set(-kSiluLimit)), set(-kSiluLimit), value);
    store(hn::Mul(hn::Mul(raised, sigmoid(value).positive), load(up, at)), y, at);
  });
}

// silu' = s (1 + x (1 - s)).
void swiglu_backward_range(std::size_t n, ConstArray gate, ConstArray up, ConstArray dy, Array dgate,
                           Array dup) {
  for_each_vector(n, [=](auto at) HWY_ATTR {
    const auto value = load(gate, at);
    const auto limited = clamp(value, -kSiluLimit, kSiluLimit);
    const auto raised = hn::IfThenElse(hn::Lt(value, limited), limited, value);
    const auto s = sigmoid(limited);
    const auto slope = hn::Mul(s.positive, mul_add(limited, s.negative, set(1.0f)));
    const auto up_value = load(up, at), dy_value = load(dy, at);
    store(hn::Mul(hn::Mul(dy_value, up_value), slope), dgate, at);
    store(hn::Mul(dy_value, hn::Mul(raised, s.positive)), dup, at);
  });
}

// An element is kept where its word, converted to [0, 1) with 24 bits, is below 1 - p in f32.
void dropout_range(std::size_t n, ConstArray x, ConstArray residual, float p, std::uint64_t seed,
                   std::uint64_t stream, std::uint64_t first_index, Array y) {
  const float keep = 1.0f - p, factor = 1.0f / keep;
  const hn::Rebind<std::uint32_t, F32> u32;
  for_each_word_chunk({seed, stream, first_index}, n,
                      [=](const std::uint32_t* words, std::size_t begin, std::size_t count) HWY_ATTR {
                        for_each_vector(count, [=](auto at) HWY_ATTR {
                          const auto kept =
                              hn::Lt(unit_interval(hn::LoadU(u32, words + at.begin)), set(keep));
                          at.begin += begin;
                          const auto value = hn::IfThenElseZero(kept, hn::Mul(load(x, at), set(factor)));
                          store(residual.data == nullptr ? value : hn::Add(load(residual, at), value), y, at);
                        });
                      });
}

// Makes elements 2 k and 2 k + 1 from these words of the stream. With u = ((word >> 8) + 1) * 2^-24 of the
// first word and v = (word >> 8) * 2^-24 of the second, they are sqrt(-2 ln u) times cos(2 pi v) and sin(2 pi
// v).
void fill_normal_range(std::size_t n, std::uint64_t seed, std::uint64_t stream, std::uint64_t first_index,
                       float mean, float deviation, Array to) {
  const hn::Rebind<std::uint32_t, F32> u32;
  HWY_ALIGN float normals[kWordChunk];
  float* const out = normals;
  for_each_word_chunk(
      {seed, stream, first_index}, n,
      [=](const std::uint32_t* words, std::size_t begin, std::size_t count) HWY_ATTR {
        const std::size_t skip = (first_index + begin) % kWordChunk;
        for (std::size_t i = 0; i < kWordChunk; i += 2 * kLanes) {
          hn::Vec<decltype(u32)> even, odd;
          hn::LoadInterleaved2(u32, words - skip + i, even, odd);
          const auto radius =
              hn::Sqrt(hn::Mul(set(-2.0f), log(hn::Add(unit_interval(even), set(0x1.0p-24f)))));
          const auto turned = sine_cosine_of_turn(unit_interval(odd));
          hn::StoreInterleaved2(hn::Mul(radius, turned.cosine), hn::Mul(radius, turned.sine), F32(), out + i);
        }
        for (std::size_t i = skip; i < skip + count; i += kLanes) {
          const std::size_t left = skip + count - i, element = begin + i - skip;
          if (left >= kLanes)
            store(mul_add(hn::LoadU(F32(), out + i), set(deviation), set(mean)), to, Whole{element});
          else
            store(mul_add(load(out, Part{i, left}), set(deviation), set(mean)), to, Part{element, left});
        }
      });
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::kernels {
HWY_EXPORT(convert_range);
HWY_EXPORT(convert_past_caches_range);
HWY_EXPORT(fill_range);
HWY_EXPORT(add_range);
HWY_EXPORT(scale_range);
HWY_EXPORT(gelu_forward_range);
HWY_EXPORT(gelu_backward_range);
HWY_EXPORT(swiglu_forward_range);
HWY_EXPORT(swiglu_backward_range);
HWY_EXPORT(dropout_range);
HWY_EXPORT(fill_normal_range);

namespace {
// From this many elements on, stores bypass the caches, which would evict most of them before they are read.
constexpr std::size_t kPastCaches = std::size_t{4} << 20;

template <class Body>
void for_ranges(Threads& threads, std::size_t n, const Body& body) {
  threads.parallel_for(n, kLoopGrain, [&](std::size_t begin, std::size_t end) { body(begin, end - begin); });
}

// Shifts an argument of a loop to a range's first element; numbers stay as they are.
ConstArray from_element(ConstArray array, std::size_t element) { return array.at(element); }
Array from_element(Array array, std::size_t element) { return array.at(element); }
float from_element(float number, std::size_t) { return number; }

void require_float_array(ConstArray array) { require_float({array}); }
void require_float_array(float) {}

// Calls loop(count, arguments...) for all ranges of n elements.
template <class Loop, class... Arguments>
void run(Threads& threads, std::size_t n, Loop& loop, Arguments... arguments) {
  (require_float_array(arguments), ...);
  for_ranges(threads, n,
             [&](std::size_t begin, std::size_t count) { loop(count, from_element(arguments, begin)...); });
}

}  // namespace

void convert(Threads& threads, std::size_t n, ConstArray from, Array to) {
  if (n >= kPastCaches) return run(threads, n, HWY_DYNAMIC_DISPATCH(convert_past_caches_range), from, to);
  run(threads, n, HWY_DYNAMIC_DISPATCH(convert_range), from, to);
}

void fill(Threads& threads, std::size_t n, float value, Array to) {
  run(threads, n, HWY_DYNAMIC_DISPATCH(fill_range), value, to);
}

void add(Threads& threads, std::size_t n, ConstArray a, ConstArray b, Array sum) {
  run(threads, n, HWY_DYNAMIC_DISPATCH(add_range), a, b, sum);
}

void scale(Threads& threads, std::size_t n, float factor, Array x) {
  run(threads, n, HWY_DYNAMIC_DISPATCH(scale_range), factor, x);
}

void convert_rows(Threads& threads, std::size_t rows, std::size_t columns, ConstArray from,
                  std::size_t from_stride, Array to, std::size_t to_stride) {
  require_float({from, to});
  const std::size_t grain = std::max<std::size_t>(kLoopGrain / std::max<std::size_t>(columns, 1), 1);
  threads.parallel_for(rows, grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row)
      HWY_DYNAMIC_DISPATCH(convert_range)(columns, from.at(row * from_stride), to.at(row * to_stride));
  });
}

// The second half of [0, 2 n) is packed into the memory of the first half, which is packed already. So ranges
// within a half can be packed in parallel, while halves follow each other from small to large.
void narrow_in_place(Threads& threads, std::size_t n, float* values, Dtype type) {
  if (type == Dtype::kF32) return;
  const ConstArray wide{values, Dtype::kF32};
  const Array packed{values, type};
  require_float({packed});
  std::size_t done = std::min(n, kLoopGrain);
  HWY_DYNAMIC_DISPATCH(convert_range)(done, wide, packed);
  while (done < n) {
    const std::size_t first = done;
    done = std::min(n, 2 * first);
    for_ranges(threads, done - first, [=](std::size_t begin, std::size_t count) {
      HWY_DYNAMIC_DISPATCH(convert_range)(count, wide.at(first + begin), packed.at(first + begin));
    });
  }
}

void fill_normal(Threads& threads, std::size_t n, std::uint64_t seed, std::uint64_t stream,
                 std::uint64_t first_index, float mean, float deviation, Array to) {
  require_float({to});
  for_ranges(threads, n, [=](std::size_t begin, std::size_t count) {
    HWY_DYNAMIC_DISPATCH(fill_normal_range)
    (count, seed, stream, first_index + begin, mean, deviation, to.at(begin));
  });
}

void gelu_forward(Threads& threads, std::size_t n, ConstArray x, Array y) {
  run(threads, n, HWY_DYNAMIC_DISPATCH(gelu_forward_range), x, y);
}

void gelu_backward(Threads& threads, std::size_t n, ConstArray x, ConstArray dy, Array dx) {
  run(threads, n, HWY_DYNAMIC_DISPATCH(gelu_backward_range), x, dy, dx);
}

void swiglu_forward(Threads& threads, std::size_t n, ConstArray gate, ConstArray up, Array y) {
  run(threads, n, HWY_DYNAMIC_DISPATCH(swiglu_forward_range), gate, up, y);
}

void swiglu_backward(Threads& threads, std::size_t n, ConstArray gate, ConstArray up, ConstArray dy,
                     Array dgate, Array dup) {
  run(threads, n, HWY_DYNAMIC_DISPATCH(swiglu_backward_range), gate, up, dy, dgate, dup);
}

void dropout_add(Threads& threads, std::size_t n, ConstArray x, ConstArray residual, float p,
                 std::uint64_t seed, std::uint64_t stream, std::uint64_t first_index, Array y) {
  if (p == 0 && residual.data == nullptr) return convert(threads, n, x, y);
  if (p == 0) return add(threads, n, residual, x, y);
  require_float({x, residual, y});
  for_ranges(threads, n, [=](std::size_t begin, std::size_t count) {
    const ConstArray added = residual.data == nullptr ? residual : residual.at(begin);
    HWY_DYNAMIC_DISPATCH(dropout_range)
    (count, x.at(begin), added, p, seed, stream, first_index + begin, y.at(begin));
  });
}

void dropout_backward(Threads& threads, std::size_t n, ConstArray dy, float p, std::uint64_t seed,
                      std::uint64_t stream, std::uint64_t first_index, Array dx) {
  dropout_add(threads, n, dy, ConstArray{}, p, seed, stream, first_index, dx);
}

}  // namespace sluice::kernels
#endif  // HWY_ONCE
