#include "float_array.h"

namespace sluice::test {
namespace {

constexpr std::size_t kPeriod = 101, kBlock = 16 * kPeriod;

template <class ValueOf>
void mix_values(std::size_t n, const ValueOf& value, const Mix& mix, std::size_t first, bool adds,
                float* out) {
  static const auto numbers = [] {
    std::array<float, kPeriod + kBlock> all;
    for (std::size_t j = 0; j < all.size(); ++j) all[j] = static_cast<float>(31 * j % kPeriod);
    return all;
  }();
  const float* const noise = &numbers[first * 88 % kPeriod];  // 31 * 88 is 1 modulo the period
  for (std::size_t begin = 0; begin < n; begin += kBlock) {
    const std::size_t count = std::min(kBlock, n - begin);
    float* const now = out + begin;
    if (adds)
      for (std::size_t j = 0; j < count; ++j)
        now[j] += mix.of_value * value(begin + j) + (mix.of_noise * noise[j] + mix.constant);
    else
      for (std::size_t j = 0; j < count; ++j)
        now[j] = mix.of_value * value(begin + j) + (mix.of_noise * noise[j] + mix.constant);
  }
}

// Calls loop(value) once, whose argument gives the element of an index.
template <class Loop>
void with_values(ConstArray array, const Loop& loop) {
  if (array.data == nullptr)
    loop([](std::size_t) { return 0.0f; });
  else if (array.type == Dtype::kF32)
    loop([values = array.f32()](std::size_t i) { return values[i]; });
  else if (array.type == Dtype::kBf16)
    loop([values = array.bf16()](std::size_t i) { return to_f32(values[i]); });
  else
    loop([values = array.f16()](std::size_t i) { return to_f32(values[i]); });
}

}  // namespace

void mix_with_noise(std::size_t n, ConstArray values, const Mix& mix, std::size_t first, bool adds,
                    float* out) {
  with_values(values, [&](const auto& value) { mix_values(n, value, mix, first, adds, out); });
}

void widen(std::size_t n, ConstArray values, float* wide) {
  with_values(values, [&](const auto& value) {
    for (std::size_t i = 0; i < n; ++i) wide[i] = value(i);
  });
}

}  // namespace sluice::test
