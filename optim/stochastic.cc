#include "optim/stochastic.h"

#include "kernels/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/stochastic.cc"
#include <hwy/foreach_target.h>

#include "kernels/simd_random-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace simd = kernels::HWY_NAMESPACE;

void widen_values(std::size_t n, const Bf16* from, float* to) {
  const ConstArray narrow = {from, Dtype::kBf16};
  simd::for_each_vector(n, [=](auto at) HWY_ATTR { simd::store(simd::load(narrow, at), to, at); });
}

// What is left after the cut is exact in bf16, so that store() rounds nothing.
template <class At>
HWY_INLINE void narrow_vector(const float* from, const std::uint32_t* words, Array to, At at) {
  const hn::Rebind<std::uint32_t, simd::F32> u32;
  const auto value = simd::load(from, at);
  const auto random = hn::And(hn::LoadU(u32, words), hn::Set(u32, 0xffffu));
  const auto raised = hn::Add(hn::BitCast(u32, value), random);
  const auto cut = hn::BitCast(simd::F32(), hn::And(raised, hn::Set(u32, 0xffff0000u)));
  simd::store(hn::IfThenElse(hn::IsNaN(value), value, cut), to, at);
}

void narrow_values(std::size_t n, const RoundingWords& words, const float* from, Bf16* to) {
  const Array narrow = {to, Dtype::kBf16};
  simd::for_each_word_chunk({words.seed, words.stream, words.first_index}, n,
                            [=](const std::uint32_t* word, std::size_t begin, std::size_t count) HWY_ATTR {
                              std::size_t i = 0;
                              for (; i + simd::kLanes <= count; i += simd::kLanes)
                                narrow_vector(from, word + i, narrow, simd::Whole{begin + i});
                              if (i < count)
                                narrow_vector(from, word + i, narrow, simd::Part{begin + i, count - i});
                            });
}

}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::optim {
HWY_EXPORT(widen_values);
HWY_EXPORT(narrow_values);

void widen(std::size_t n, const Bf16* from, float* to) { HWY_DYNAMIC_DISPATCH(widen_values)(n, from, to); }

void narrow_stochastically(std::size_t n, const RoundingWords& words, const float* from, Bf16* to) {
  HWY_DYNAMIC_DISPATCH(narrow_values)(n, words, from, to);
}

}  // namespace sluice::optim
#endif  // HWY_ONCE
