// One loop for all optimizers: it brings the elements of every array as vectors of f32, whatever they are
// held in, and takes what an optimizer makes of them back. Compiled once for each target: include it after
// hwy/foreach_target.h.
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

// What a vector of a parameter's elements has: of arrays of state as many as the optimizer keeps.
struct Elements {
  kernels::HWY_NAMESPACE::F32Vector gradient, value, first, second;
};

namespace update {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = kernels::HWY_NAMESPACE;
using simd::F32, simd::F32Vector;

// What a block needs beside its arrays. (As a part of what follows it would keep that out of registers.)
struct Scratch {
  HWY_ALIGN float values[2][kScaleBlock];
  HWY_ALIGN std::uint32_t words[kScaleBlock / 2];
};

// Arrays of averages come first, and of squares second.
template <std::size_t kArray>
inline constexpr CodeMap kMapOf = kArray == 0 ? CodeMap::kSigned : CodeMap::kUnsigned;

class NoState {
 public:
  HWY_INLINE NoState(const Piece&, std::size_t, Scratch&) {}
  HWY_INLINE void ask(std::size_t) const {}
  template <class At>
  HWY_INLINE F32Vector load(At) const {
    return simd::set(0);
  }
  template <class At>
  HWY_INLINE void store(F32Vector, At) const {}
  HWY_INLINE void finish(std::size_t) const {}
};

// As f32, bf16 or f16.
template <std::size_t kArray>
class PlainState {
 public:
  HWY_INLINE PlainState(const Piece& piece, std::size_t begin, Scratch&)
      : values_(piece.state[kArray].values.at(begin)) {}
  HWY_INLINE void ask(std::size_t at) const { simd::ask_ahead(values_, at); }
  template <class At>
  HWY_INLINE F32Vector load(At at) const {
    return simd::load(values_, at);
  }
  template <class At>
  HWY_INLINE void store(F32Vector value, At at) {
    simd::store(value, values_, at);
  }
  HWY_INLINE void finish(std::size_t) {}

 private:
  Array values_;
};

// As codes of one block: the new values wait until their scale is known.
template <std::size_t kArray>
class CodedState {
 public:
  HWY_INLINE CodedState(const Piece& piece, std::size_t begin, Scratch& scratch)
      : codes_(static_cast<std::uint8_t*>(piece.state[kArray].values.data) + begin),
        scale_(piece.state[kArray].scales + begin / kScaleBlock),
        values_(scratch.values[kArray]),
        decoder_(*scale_) {}
  HWY_INLINE void ask(std::size_t at) const { hwy::Prefetch(codes_ + at + simd::kAhead); }
  template <class At>
  HWY_INLINE F32Vector load(At at) const {
    return decoder_.decoded(codes_, at);
  }
  HWY_INLINE void store(F32Vector value, simd::Whole at) {
    hn::Store(value, F32(), values_ + at.begin);
    largest_.look_at(value);
  }
  HWY_INLINE void store(F32Vector value, simd::Part at) {
    store(hn::IfThenElseZero(hn::FirstN(F32(), at.count), value), simd::Whole{at.begin});
  }
  HWY_INLINE void finish(std::size_t n) {
    *scale_ = largest_.scale();
    codes::encode_block<kMapOf<kArray>>(n, values_, *scale_, codes_);
  }

 private:
  std::uint8_t* codes_;
  float* scale_;
  float* values_;
  codes::Decoder<kMapOf<kArray>> decoder_;
  codes::Largest largest_;
};

// In f32, with or without a copy in another type.
class Master {
 public:
  HWY_INLINE Master(const Piece& piece, std::size_t begin, Scratch&) : master_(piece.master + begin) {
    if (piece.parameter.data != nullptr) parameter_ = piece.parameter.at(begin);
    past_caches_ = simd::stores_past_caches(parameter_);
  }
  HWY_INLINE void ask(std::size_t at) const { simd::ask_ahead({master_, Dtype::kF32}, at); }
  template <class At>
  HWY_INLINE F32Vector load(At at) const {
    return simd::load(master_, at);
  }
  HWY_INLINE void store(F32Vector value, simd::Whole at) const {
    simd::store(value, master_, at);
    if (parameter_.data == nullptr) return;
    if (past_caches_)
      simd::store_past_caches(value, parameter_, at);
    else
      simd::store(value, parameter_, at);
  }
  HWY_INLINE void store(F32Vector value, simd::Part at) const {
    simd::store(value, master_, at);
    if (parameter_.data != nullptr) simd::store(value, parameter_, at);
  }

 private:
  float* master_;
  Array parameter_;
  bool past_caches_;
};

// In bf16 alone: to the lower 16 bits, which are cut off, 16 random ones are added. NaN stays NaN.
class Rounded {
 public:
  HWY_INLINE Rounded(const Piece& piece, std::size_t begin, Scratch& scratch)
      : values_(piece.parameter.bf16() + begin), words_(scratch.words) {
    const RoundingWords& w = piece.words;
    simd::fill_words<kScaleBlock / 2>({w.seed, w.stream, 0}, (w.first_index + begin) / kElementsOfBlock,
                                      words_);
  }
  HWY_INLINE void ask(std::size_t at) const { simd::ask_ahead({values_, Dtype::kBf16}, at); }
  template <class At>
  HWY_INLINE F32Vector load(At at) const {
    return simd::load(ConstArray{values_, Dtype::kBf16}, at);
  }
  HWY_INLINE void store(F32Vector value, simd::Whole at) const {
    store_to(value, at.begin, values_ + at.begin);
  }
  HWY_INLINE void store(F32Vector value, simd::Part at) const {
    Bf16 lanes[simd::kLanes];
    store_to(value, at.begin, lanes);
    std::memcpy(values_ + at.begin, lanes, at.count * sizeof(Bf16));
  }

 private:
  static constexpr std::size_t kElementsOfBlock = 8;  // of Philox: 128 bits

  HWY_INLINE void store_to(F32Vector value, std::size_t begin, Bf16* to) const {
    const hn::Rebind<std::uint32_t, F32> u32;
    const hn::Rebind<std::uint16_t, F32> u16;
    const auto halves = hn::LoadU(u16, reinterpret_cast<const std::uint16_t*>(words_) + begin);
    const auto bits = hn::BitCast(u32, value);
    const auto raised = hn::Add(bits, hn::PromoteTo(u32, halves));
    const auto cut = simd::cut(u32, hn::IfThenElse(hn::RebindMask(u32, hn::IsNaN(value)), bits, raised));
    hn::StoreU(cut, u16, reinterpret_cast<std::uint16_t*>(to));
  }

  Bf16* values_;
  std::uint32_t* words_;
};

template <class First, class Second, class Value, class Body>
HWY_INLINE void update_block(const Piece& piece, const GradientRule& rule, std::size_t begin, std::size_t n,
                             const Body& body) {
  Scratch scratch;
  First first(piece, begin, scratch);
  Second second(piece, begin, scratch);
  Value value(piece, begin, scratch);
  const ConstArray gradient = piece.gradient.at(begin);
  simd::for_each_vector(n, [&](auto at) SLUICE_BODY {
    simd::ask_ahead(gradient, at.begin);
    value.ask(at.begin);
    first.ask(at.begin);
    second.ask(at.begin);
    Elements e = {ruled(F32(), rule, gradient, at), value.load(at), first.load(at), second.load(at)};
    auto moved = at;
    moved.begin += begin;
    body(moved, e);
    first.store(e.first, at);
    second.store(e.second, at);
    value.store(e.value, at);
  });
  first.finish(n);
  second.finish(n);
}

template <std::size_t kArrays, template <std::size_t> class State, class Value, class Body>
HWY_INLINE void update_blocks(const Piece& piece, const GradientRule& rule, const Body& body) {
  using First = std::conditional_t<(kArrays > 0), State<0>, NoState>;
  using Second = std::conditional_t<(kArrays > 1), State<1>, NoState>;
  for (std::size_t begin = 0; begin < piece.count; begin += kScaleBlock)
    update_block<First, Second, Value>(piece, rule, begin, std::min(kScaleBlock, piece.count - begin), body);
}

}  // namespace update

// body(at, elements) for all vectors of a piece: it turns the value and the state into the new ones. `at`
// counts from the piece's first element. Of codes and of parameters without a master whole blocks are done,
// from their first element on.
template <std::size_t kArrays, class Body>
HWY_INLINE void update_elements(const Piece& piece, const GradientRule& rule, const Body& body) {
  using namespace update;
  const bool coded = kArrays > 0 && piece.state[0].values.type == Dtype::kU8;
  if (piece.master != nullptr) {
    if (coded)
      update_blocks<kArrays, CodedState, Master>(piece, rule, body);
    else
      update_blocks<kArrays, PlainState, Master>(piece, rule, body);
    if (piece.parameter.data != nullptr) hwy::FlushStream();
  } else if (coded) {
    update_blocks<kArrays, CodedState, Rounded>(piece, rule, body);
  } else {
    update_blocks<kArrays, PlainState, Rounded>(piece, rule, body);
  }
}

}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
