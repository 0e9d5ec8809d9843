#include "models/ops/rotary.h"

#include <cmath>
#include <numbers>

#include "kernels/rope.h"

namespace sluice::models {
namespace {

// Long waves are slowed down by the factor, short ones are left, and those between are blended.
double stretched(double frequency, const RopeScaling& scaling) {
  const double context = static_cast<double>(scaling.original_context);
  const double wavelength = 2 * std::numbers::pi / frequency;
  if (wavelength > context / scaling.low_frequency_factor) return frequency / scaling.factor;
  if (wavelength < context / scaling.high_frequency_factor) return frequency;
  const double smooth = (context / wavelength - scaling.low_frequency_factor) /
                        (scaling.high_frequency_factor - scaling.low_frequency_factor);
  return (1 - smooth) * frequency / scaling.factor + smooth * frequency;
}

}  // namespace

std::vector<double> rotary_frequencies(const ModelConfig& config) {
  std::vector<double> frequencies(config.head_width / 2);
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const double exponent = 2 * static_cast<double>(i) / static_cast<double>(config.head_width);
    frequencies[i] = std::pow(config.rope_theta, -exponent);
    if (config.rope_scaling) frequencies[i] = stretched(frequencies[i], *config.rope_scaling);
  }
  return frequencies;
}

void turn(Threads& threads, const Rotary& rotary, std::size_t rows, std::size_t first_position, bool inverse,
          Array packed) {
  kernels::rope(threads, rows, rotary.length, first_position, rotary.heads, rotary.head_width, rotary.stride,
                rotary.frequencies, inverse, packed);
}

}  // namespace sluice::models
