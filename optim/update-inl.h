// The loop of all elementwise updates: it loads arrays of any type as vectors of f32, and stores the
// optimizer's results. Compiled once for each target: include it after hwy/foreach_target.h.
#if defined(SLUICE_OPTIM_UPDATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_OPTIM_UPDATE_INL_H_
#undef SLUICE_OPTIM_UPDATE_INL_H_
#else
#define SLUICE_OPTIM_UPDATE_INL_H_
#endif

#include "kernels/simd_random-inl.h"
#include "optim/eight_bit-inl.h"
#include "optim/gradient-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {

// One vector of a parameter's elements. `first` and `second` are entries of the optimizer's state arrays.
struct Elements {
  simd::F32Vector gradient, value, first, second;
};

namespace update {
using simd::F32, simd::F32Vector;

// Vectors are updated in groups: the type of an array is tested once for a group, and the latency of one
// vector's division or square root is hidden by the others.
inline constexpr std::size_t kGroupVectors = 4, kGroup = kGroupVectors * simd::kLanes;
using simd::Vectors;

// The number of elements that one vector of Philox blocks has random words for.
inline constexpr std::size_t kElementsOfWords = 8;  // elements per Philox block (128 bits)
inline constexpr std::size_t kRun = kElementsOfWords * hn::MaxLanes(simd::U64());
static_assert(kScaleBlock % kRun == 0 && kRun % kGroup == 0);

// Memory that a block needs beside its arrays. (As members of the classes below it would cost registers.)
struct Scratch {
  explicit Scratch(const SpanRange& range) : keys(range.words.seed) {}
  HWY_ALIGN float values[2][kScaleBlock];
  HWY_ALIGN std::uint32_t words[kRun / 2];
  const simd::PhiloxKeys keys;
};

// The first state array holds averages, the second one averages of squares.
template <std::size_t kArray>
inline constexpr CodeMap kMapOf = kArray == 0 ? CodeMap::kSigned : CodeMap::kUnsigned;

// Each of the following classes loads and stores one array of a block: kCount whole vectors, or a shorter
// one.
class NoState {
 public:
  HWY_INLINE NoState(const SpanRange&, std::size_t, Scratch&) {}
  HWY_INLINE void ask(std::size_t) const {}
  template <std::size_t kCount, class At>
  HWY_INLINE Vectors<kCount> load(At) const {
    return Vectors<kCount>::make([](std::size_t) SLUICE_BODY { return simd::set(0); });
  }
  template <std::size_t kCount, class At>
  HWY_INLINE void store(const Vectors<kCount>&, At) const {}
  HWY_INLINE void finish(std::size_t) const {}
};

// State of type f32, bf16 or f16.
template <std::size_t kArray>
class PlainState {
 public:
  HWY_INLINE PlainState(const SpanRange& range, std::size_t begin, Scratch&)
      : values_(range.state[kArray].values.at(begin)) {}
  HWY_INLINE void ask(std::size_t at) const { simd::ask_ahead<kGroup>(values_, at); }
  template <std::size_t kCount, class At>
  HWY_INLINE Vectors<kCount> load(At at) const {
    return simd::load_vectors<kCount>(values_, at);
  }
  template <std::size_t kCount, class At>
  HWY_INLINE void store(const Vectors<kCount>& from, At at) const {
    simd::store_vectors(from, values_, at);
  }
  HWY_INLINE void finish(std::size_t) const {}

 private:
  Array values_;
};

// State in codes. New values are buffered until the block's scale is known.
template <std::size_t kArray>
class CodedState {
 public:
  HWY_INLINE CodedState(const SpanRange& range, std::size_t begin, Scratch& scratch)
      : codes_(static_cast<std::uint8_t*>(range.state[kArray].values.data) + begin),
        scale_(range.state[kArray].scales + begin / kScaleBlock),
        values_(scratch.values[kArray]),
        decoder_(*scale_) {}
  HWY_INLINE void ask(std::size_t at) const { hwy::Prefetch(codes_ + at + simd::kAhead); }
  template <std::size_t kCount, class At>
  HWY_INLINE Vectors<kCount> load(At at) const {
    return Vectors<kCount>::make([&](std::size_t j)
                                     SLUICE_BODY { return decoder_.decoded(codes_, simd::next(at, j)); });
  }
  template <std::size_t kCount>
  HWY_INLINE void store(const Vectors<kCount>& from, simd::Whole at) {
    from.each([&](F32Vector value, std::size_t j) SLUICE_BODY { keep(value, simd::next(at, j).begin); });
  }
  template <std::size_t kCount>
  HWY_INLINE void store(const Vectors<kCount>& from, simd::Part at) {
    keep(hn::IfThenElseZero(hn::FirstN(F32(), at.count), from.v0), at.begin);
  }
  HWY_INLINE void finish(std::size_t n) {
    *scale_ = largest_.scale();
    codes::encode_block<kMapOf<kArray>>(n, values_, *scale_, codes_);
  }

 private:
  HWY_INLINE void keep(F32Vector value, std::size_t begin) {
    hn::Store(value, F32(), values_ + begin);
    largest_.look_at(value);
  }

  std::uint8_t* codes_;
  float* scale_;
  float* values_;
  codes::Decoder<kMapOf<kArray>> decoder_;
  codes::Largest largest_;
};

// A parameter with an f32 master, with or without a copy in another type.
class Master {
 public:
  HWY_INLINE Master(const SpanRange& range, std::size_t begin, Scratch&) : master_(range.master + begin) {
    if (range.parameter.data != nullptr) parameter_ = range.parameter.at(begin);
    past_caches_ = simd::stores_past_caches(parameter_);
  }
  HWY_INLINE void ask(std::size_t at) const { simd::ask_ahead<kGroup>({master_, Dtype::kF32}, at); }
  template <std::size_t kCount, class At>
  HWY_INLINE Vectors<kCount> load(At at) const {
    return simd::load_vectors<kCount>({master_, Dtype::kF32}, at);
  }
  template <std::size_t kCount, class At>
  HWY_INLINE void store(const Vectors<kCount>& from, At at) const {
    simd::store_vectors(from, {master_, Dtype::kF32}, at);
    if (parameter_.data == nullptr) return;
    if constexpr (std::is_same_v<At, simd::Whole>)
      if (past_caches_) return simd::store_vectors_past_caches(from, parameter_, at);
    simd::store_vectors(from, parameter_, at);
  }

 private:
  float* master_;
  Array parameter_;
  bool past_caches_;
};

// A parameter in bf16 without a master, rounded stochastically: 16 random bits are added to the lower 16,
// which are then cut off. NaN stays NaN.
class Rounded {
 public:
  HWY_INLINE Rounded(const SpanRange& range, std::size_t begin, Scratch& scratch)
      : values_(range.parameter.bf16() + begin),
        words_(scratch.words),
        keys_(scratch.keys),
        stream_(range.words.stream),
        first_index_(range.words.first_index + begin) {}
  HWY_INLINE void ask(std::size_t at) const { simd::ask_ahead<kGroup>({values_, Dtype::kBf16}, at); }
  template <std::size_t kCount, class At>
  HWY_INLINE Vectors<kCount> load(At at) const {
    if (at.begin % kRun == 0)
      simd::fill_words<kRun / 2, kRoundingPhiloxRounds>(stream_, keys_,
                                                        (first_index_ + at.begin) / kElementsOfWords, words_);
    return simd::load_vectors<kCount>({values_, Dtype::kBf16}, at);
  }
  template <std::size_t kCount>
  HWY_INLINE void store(const Vectors<kCount>& from, simd::Whole at) const {
    auto* const to = reinterpret_cast<std::uint16_t*>(values_);
    const auto store = [=](auto bits, std::size_t i)
                           SLUICE_BODY { hn::StoreU(bits, hn::DFromV<decltype(bits)>(), to + i); };
    if (HWY_LIKELY(simd::are_numbers(from)))
      simd::cut_each(
          from, at, [&](F32Vector value, std::size_t i) SLUICE_BODY { return raised(value, i); }, store);
    else
      simd::cut_each(
          from, at, [&](F32Vector value, std::size_t i) SLUICE_BODY { return raised_any(value, i); }, store);
  }
  template <std::size_t kCount>
  HWY_INLINE void store(const Vectors<kCount>& from, simd::Part at) const {
    Bf16 lanes[simd::kLanes];
    hn::StoreU(simd::cut(U32(), raised_any(from.v0, at.begin)), U16(),
               reinterpret_cast<std::uint16_t*>(lanes));
    std::memcpy(values_ + at.begin, lanes, at.count * sizeof(Bf16));
  }

 private:
  using U32 = hn::Rebind<std::uint32_t, F32>;
  using U16 = hn::Rebind<std::uint16_t, F32>;

  HWY_INLINE hn::Vec<U32> raised(F32Vector value, std::size_t begin) const {
    const auto* const halves = reinterpret_cast<const std::uint16_t*>(words_) + begin % kRun;
    return hn::Add(hn::BitCast(U32(), value), hn::PromoteTo(U32(), hn::LoadU(U16(), halves)));
  }
  HWY_INLINE hn::Vec<U32> raised_any(F32Vector value, std::size_t begin) const {
    const auto is_nan = hn::RebindMask(U32(), hn::IsNaN(value));
    return hn::IfThenElse(is_nan, hn::BitCast(U32(), value), raised(value, begin));
  }

  Bf16* values_;
  std::uint32_t* words_;
  const simd::PhiloxKeys& keys_;
  std::uint64_t stream_, first_index_;
};

template <class First, class Second, class Value>
struct Block {
  HWY_INLINE Block(const SpanRange& range, std::size_t the_begin, Scratch& scratch)
      : begin(the_begin),
        first(range, begin, scratch),
        second(range, begin, scratch),
        value(range, begin, scratch),
        gradient(range.gradient.at(begin)) {}

  HWY_INLINE void ask(std::size_t at) const {
    simd::ask_ahead<kGroup>(gradient, at);
    value.ask(at);
    first.ask(at);
    second.ask(at);
  }
  template <std::size_t kCount, class At, class Body>
  HWY_INLINE void update(const GradientRule& rule, At at, const Body& body) {
    const auto gradients = simd::load_vectors<kCount>(gradient, at);
    auto values = value.template load<kCount>(at);
    auto firsts = first.template load<kCount>(at);
    auto seconds = second.template load<kCount>(at);
    const auto one = [&](std::size_t j, F32Vector g, F32Vector& v, F32Vector& f, F32Vector& s) SLUICE_BODY {
      Elements e = {ruled(F32(), rule, g), v, f, s};
      auto moved = simd::next(at, j);
      moved.begin += begin;
      body(moved, e);
      v = e.value;
      f = e.first;
      s = e.second;
    };
    one(0, gradients.v0, values.v0, firsts.v0, seconds.v0);
    if constexpr (kCount == kGroupVectors) {
      one(1, gradients.v1, values.v1, firsts.v1, seconds.v1);
      one(2, gradients.v2, values.v2, firsts.v2, seconds.v2);
      one(3, gradients.v3, values.v3, firsts.v3, seconds.v3);
    }
    first.store(firsts, at);
    second.store(seconds, at);
    value.store(values, at);
  }

  std::size_t begin;
  First first;
  Second second;
  Value value;
  ConstArray gradient;
};

template <class First, class Second, class Value, class Body>
HWY_INLINE void update_block(const SpanRange& range, const GradientRule& rule, std::size_t begin,
                             std::size_t n, Scratch& scratch, const Body& body) {
  Block<First, Second, Value> block(range, begin, scratch);
  std::size_t i = 0;
  for (; i + kGroup <= n; i += kGroup) {
    block.ask(i);
    block.template update<kGroupVectors>(rule, simd::Whole{i}, body);
  }
  for (; i < n; i += simd::kLanes)  // the tail, vector by vector, as if each were short
    block.template update<1>(rule, simd::Part{i, std::min(simd::kLanes, n - i)}, body);
  block.first.finish(n);
  block.second.finish(n);
}

template <std::size_t kArrays, template <std::size_t> class State, class Value, class Body>
HWY_INLINE void update_blocks(const SpanRange& range, const GradientRule& rule, const Body& body) {
  using First = std::conditional_t<(kArrays > 0), State<0>, NoState>;
  using Second = std::conditional_t<(kArrays > 1), State<1>, NoState>;
  Scratch scratch(range);
  for (std::size_t begin = 0; begin < range.count; begin += kScaleBlock)
    update_block<First, Second, Value>(range, rule, begin, std::min(kScaleBlock, range.count - begin),
                                       scratch, body);
}

template <std::size_t kArrays, class Value, class Body>
HWY_INLINE void update_values(const SpanRange& range, const GradientRule& rule, const Body& body) {
  if constexpr (kArrays > 0)
    if (range.state[0].values.type == Dtype::kU8)
      return update_blocks<kArrays, CodedState, Value>(range, rule, body);
  update_blocks<kArrays, PlainState, Value>(range, rule, body);
}

}  // namespace update

// Calls body(at, elements) for all vectors of a range; it replaces the value and the state. `at` counts from
// the range's first element. REQUIRES: with state in codes, and for parameters without a master, the range
// begins at a multiple of kScaleBlock.
template <std::size_t kArrays, class Body>
HWY_INLINE void update_elements(const SpanRange& range, const GradientRule& rule, const Body& body) {
  using namespace update;
  if (range.master == nullptr) return update_values<kArrays, Rounded>(range, rule, body);
  update_values<kArrays, Master>(range, rule, body);
  if (range.parameter.data != nullptr) hwy::FlushStream();
}

}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
