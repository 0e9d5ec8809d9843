#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

// Arrays in 8 bits: a code for each element, and an f32 scale for each block of them (Dettmers et al. 2022,
// "8-bit Optimizers via Block-wise Quantization", sections 2 and 3). docs/optimizers.md says what a code
// stands for.
namespace sluice::optim {

// Elements that share a scale, counted from the parameter's first one.
inline constexpr std::size_t kScaleBlock = 256;

// Whether codes stand for values of both signs, or for values of 0 and more in finer steps.
enum class CodeMap : std::uint8_t { kSigned, kUnsigned };

// What each code stands for, before it is multiplied by its scale. The table lives for ever.
std::span<const float, 256> code_values(CodeMap map);

// codes: [n]; scales: one for each kScaleBlock elements, the last of which may be fewer. To nearest, what is
// half-way to the one nearer to 0; but with kUnsigned what is above 0 stays above 0. What decode() gives,
// encode() leaves as it is. A block with a value that is not finite becomes infinite, or not a number, in all
// its elements. The same bits on every target. REQUIRES: with kUnsigned, no value is below 0. Thread rule:
// any thread.
void encode(std::size_t n, CodeMap map, const float* values, std::uint8_t* codes, float* scales);
void decode(std::size_t n, CodeMap map, const std::uint8_t* codes, const float* scales, float* values);

}  // namespace sluice::optim
