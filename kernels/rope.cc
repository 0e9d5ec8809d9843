#include "kernels/rope.h"

#include <algorithm>

#include "kernels/simd.h"

#include "kernels/simd-inl.h"
#include "kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::kernels::HWY_NAMESPACE {

inline constexpr std::size_t kAngles = 128;  // cosines and sines on the stack at once

// Angle, sine and cosine are computed in f64 and rounded once. An f32 angle is inaccurate at large positions.
HWY_INLINE void fill_turns(std::size_t count, const double* frequencies, double position, bool inverse,
                           float* cosines, float* sines) {
  const hn::CappedTag<double, 8> f64;
  const hn::Rebind<float, decltype(f64)> f32;
  HWY_ALIGN double angles[kAngles] = {};
  for (std::size_t i = 0; i < count; ++i) angles[i] = position * frequencies[i];
  for (std::size_t i = 0; i < count; i += hn::MaxLanes(f64)) {
    const auto turned = sine_cosine_of_angle(hn::Load(f64, angles + i));
    const auto sine = inverse ? hn::Neg(turned.sine) : turned.sine;
    hn::StoreU(hn::DemoteTo(f32, turned.cosine), f32, cosines + i);
    hn::StoreU(hn::DemoteTo(f32, sine), f32, sines + i);
  }
}

HWY_INLINE void turn(std::size_t count, const float* cosines, const float* sines, Array first, Array second) {
  for_each_vector(count, [=](auto at) HWY_ATTR {
    const auto a = load(first, at), b = load(second, at);
    const auto cosine = load(cosines, at), sine = load(sines, at);
    store(mul_add(a, cosine, hn::Neg(hn::Mul(b, sine))), first, at);
    store(mul_add(b, cosine, hn::Mul(a, sine)), second, at);
  });
}

// Rotates all rows of one position: `rows` rows, row_stride elements apart.
void rope_position(std::size_t rows, std::size_t row_stride, std::size_t heads, std::size_t head_width,
                   double position, const double* frequencies, bool inverse, Array x) {
  const std::size_t half = head_width / 2;
  HWY_ALIGN float cosines[kAngles], sines[kAngles];
  for (std::size_t i = 0; i < half; i += kAngles) {
    const std::size_t count = half - i < kAngles ? half - i : kAngles;
    fill_turns(count, frequencies + i, position, inverse, cosines, sines);
    for (std::size_t row = 0; row < rows; ++row)
      for (std::size_t head = 0; head < heads; ++head) {
        const std::size_t element = row * row_stride + head * head_width + i;
        turn(count, cosines, sines, x.at(element), x.at(element + half));
      }
  }
}

}  // namespace sluice::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::kernels {
HWY_EXPORT(rope_position);

void rope(Threads& threads, std::size_t rows, std::size_t length, std::size_t first_position,
          std::size_t heads, std::size_t head_width, std::size_t stride, std::span<const double> frequencies,
          bool inverse, Array x) {
  require_float({x});
  ensure(head_width % 2 == 0 && frequencies.size() == head_width / 2,
         "rope takes a frequency for each pair of a head's elements: {} elements, {} frequencies", head_width,
         frequencies.size());
  const std::size_t positions = std::min(rows, length);
  const std::size_t work = rows / std::max<std::size_t>(positions, 1) * heads * head_width;
  const std::size_t grain = std::max<std::size_t>(kLoopGrain / 2 / std::max<std::size_t>(work, 1), 1);
  threads.parallel_for(positions, grain, [&](std::size_t begin, std::size_t end) {
    for (std::size_t t = begin; t < end; ++t) HWY_DYNAMIC_DISPATCH(rope_position)
    ((rows - t - 1) / length + 1, length * stride, heads, head_width, static_cast<double>(first_position + t),
     frequencies.data(), inverse, x.at(t * stride));
  });
}

}  // namespace sluice::kernels
#endif  // HWY_ONCE
