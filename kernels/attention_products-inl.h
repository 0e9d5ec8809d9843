// Products of small packed f32 matrices. Every element of C is a sum over k in ascending order, by fused
// multiply-adds, so that its bits do not depend on the vector width. Compiled once for each target: include
// it after hwy/foreach_target.h.
#if defined(SLUICE_ATTENTION_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLUICE_ATTENTION_PRODUCTS_INL_H_
#undef SLUICE_ATTENTION_PRODUCTS_INL_H_
#else
#define SLUICE_ATTENTION_PRODUCTS_INL_H_
#endif

#include "kernels/attention_simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

// The rows of C that are held in registers at once. AVX-512 has 32 registers, AVX2 has 16.
inline constexpr std::size_t kBlockRows = kLanes == 16 ? 16 : 6;

// How A is stored: [rows][depth], or [depth][rows].
enum class Stored { kByRows, kByDepth };

struct Factor {
  const float* data;
  std::size_t stride;
};

// Computes C[kRows][16] = A B, or C += A B.
template <std::size_t kRows, Stored kStored>
HWY_INLINE void multiply_rows(std::size_t depth, Factor a, Factor b, float* HWY_RESTRICT c,
                              std::size_t c_stride, bool accumulate) {
  const F32 d;
  const std::size_t row_step = kStored == Stored::kByRows ? a.stride : 1;
  const std::size_t depth_step = kStored == Stored::kByRows ? 1 : a.stride;
  F32Vector sums[kRows][kRowVectors];
  HWY_UNROLL(16)
  for (std::size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (std::size_t v = 0; v < kRowVectors; ++v)
      sums[r][v] = accumulate ? hn::LoadU(d, c + r * c_stride + v * kLanes) : hn::Zero(d);
  }
  const float* a_data = a.data;
  const float* b_data = b.data;
  for (std::size_t k = 0; k < depth; ++k, a_data += depth_step, b_data += b.stride) {
    F32Vector row[kRowVectors];
    HWY_UNROLL(4)
    for (std::size_t v = 0; v < kRowVectors; ++v) row[v] = hn::LoadU(d, b_data + v * kLanes);
    HWY_UNROLL(16)
    for (std::size_t r = 0; r < kRows; ++r) {
      const F32Vector factor = hn::Set(d, a_data[r * row_step]);
      HWY_UNROLL(4)
      for (std::size_t v = 0; v < kRowVectors; ++v) sums[r][v] = mul_add(factor, row[v], sums[r][v]);
    }
  }
  HWY_UNROLL(16)
  for (std::size_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(4)
    for (std::size_t v = 0; v < kRowVectors; ++v) hn::StoreU(sums[r][v], d, c + r * c_stride + v * kLanes);
  }
}

// Computes C[rows][16] = A B, or C += A B.
template <Stored kStored>
HWY_INLINE void multiply_panel(std::size_t rows, std::size_t depth, Factor a, Factor b, float* c,
                               std::size_t c_stride, bool accumulate) {
  const std::size_t row_step = kStored == Stored::kByRows ? a.stride : 1;
  std::size_t r = 0;
  const auto at = [&](std::size_t row) { return Factor{a.data + row * row_step, a.stride}; };
  for (; r + kBlockRows <= rows; r += kBlockRows)
    multiply_rows<kBlockRows, kStored>(depth, at(r), b, c + r * c_stride, c_stride, accumulate);
  for (; r + 4 <= rows; r += 4)
    multiply_rows<4, kStored>(depth, at(r), b, c + r * c_stride, c_stride, accumulate);
  for (; r < rows; ++r) multiply_rows<1, kStored>(depth, at(r), b, c + r * c_stride, c_stride, accumulate);
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
