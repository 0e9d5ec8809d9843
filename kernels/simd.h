#pragma once
#include <cstddef>
#include <initializer_list>

#include "core/dtype.h"
#include "core/error.h"
#include "core/threads.h"

// Private to the kernels and the optimizers. Include it before <hwy/highway.h>. Loops need targets with fused
// multiply-add and a vector length known at compile time: AVX2, AVX-512 (AVX3), NEON, and scalar code with
// std::fma. The other targets are disabled by their bits in hwy/detect_targets.h: those above AVX3 (which add
// nothing here), SSE2 to SSE4 (10..14), SVE (15..27; such CPUs run NEON) and RVV (37).
#define HWY_DISABLED_TARGETS \
  ((HWY_AVX3 - 1LL) | 0x7C00LL | ((1LL << 28) - (1LL << 15)) | (1LL << 37))  // NOLINT: used by Highway

namespace sluice::kernels {

inline constexpr std::size_t kLoopGrain = std::size_t{32} << 10;  // elements of an elementwise loop's task

inline void require_float(std::initializer_list<ConstArray> arrays) {
  for (const ConstArray& array : arrays)
    ensure(is_float(array.type),
           "a kernel takes arrays of f32, bf16 or f16 and was given {}; convert the array first",
           name_of(array.type));
}

// The number of rows that column_sum() adds in order as one block.
inline constexpr std::size_t kRowBlock = 64;
// Sets out[j] to (or adds, where accumulate) the pairwise sum of partials[block * stride + j] over the
// blocks. Overwrites partials. Defined in reduce.cc.
void add_row_blocks(Threads& threads, std::size_t blocks, std::size_t width, std::size_t stride,
                    float* partials, float* out, bool accumulate);

}  // namespace sluice::kernels
