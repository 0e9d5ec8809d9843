#include "optim/eight_bit.h"

#include <algorithm>

#include "kernels/simd.h"
#include "optim/code_table.h"

#include "optim/eight_bit-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::optim::HWY_NAMESPACE {

template <CodeMap kMap>
HWY_INLINE void encode_blocks_of(std::size_t n, const float* values, std::uint8_t* to, float* scales) {
  for (std::size_t i = 0; i < n; i += kScaleBlock) {
    const std::size_t count = std::min(kScaleBlock, n - i);
    codes::Largest largest;
    simd::for_each_vector(count, [&](auto at) HWY_ATTR { largest.look_at(simd::load(values + i, at)); });
    const float scale = scales[i / kScaleBlock] = largest.scale();
    codes::encode_block<kMap>(count, values + i, scale, to + i);
  }
}

template <CodeMap kMap>
HWY_INLINE void decode_blocks_of(std::size_t n, const std::uint8_t* from, const float* scales,
                                 float* values) {
  for (std::size_t i = 0; i < n; i += kScaleBlock) {
    const codes::Decoder<kMap> decoder(scales[i / kScaleBlock]);
    simd::for_each_vector(std::min(kScaleBlock, n - i), [=](auto at) HWY_ATTR {
      simd::store(decoder.decoded(from + i, at), values + i, at);
    });
  }
}

void encode_blocks(std::size_t n, CodeMap map, const float* values, std::uint8_t* to, float* scales) {
  if (map == CodeMap::kSigned)
    encode_blocks_of<CodeMap::kSigned>(n, values, to, scales);
  else
    encode_blocks_of<CodeMap::kUnsigned>(n, values, to, scales);
}

void decode_blocks(std::size_t n, CodeMap map, const std::uint8_t* from, const float* scales, float* values) {
  if (map == CodeMap::kSigned)
    decode_blocks_of<CodeMap::kSigned>(n, from, scales, values);
  else
    decode_blocks_of<CodeMap::kUnsigned>(n, from, scales, values);
}

}  // namespace sluice::optim::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::optim {
HWY_EXPORT(encode_blocks);
HWY_EXPORT(decode_blocks);

void encode(std::size_t n, CodeMap map, const float* values, std::uint8_t* codes, float* scales) {
  HWY_DYNAMIC_DISPATCH(encode_blocks)(n, map, values, codes, scales);
}

void decode(std::size_t n, CodeMap map, const std::uint8_t* codes, const float* scales, float* values) {
  HWY_DYNAMIC_DISPATCH(decode_blocks)(n, map, codes, scales, values);
}

}  // namespace sluice::optim
#endif  // HWY_ONCE
