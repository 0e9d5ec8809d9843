#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

// Arrays in 8 bits: a code for each element, and an f32 scale for each block of them (Dettmers et al. 2022,
// "8-bit Optimizers via Block-wise Quantization", sections 2 and 3). docs/optimizers.md explains the codes.
namespace sluice::optim {

// The number of elements that share a scale. Blocks are counted from the parameter's first element.
inline constexpr std::size_t kScaleBlock = 256;

// kSigned codes stand for values of both signs, kUnsigned codes for values of 0 and more in finer steps.
enum class CodeMap : std::uint8_t { kSigned, kUnsigned };

// Returns what each code stands for before it is multiplied by its scale. The table lives for ever.
std::span<const float, 256> code_values(CodeMap map);

// codes are [n], with a scale for each block of kScaleBlock elements (the last may have fewer). encode()
// rounds to nearest, and half-way towards 0; but with kUnsigned a value above 0 stays above 0. It encodes
// what decode() gave to the same codes. A value that is not finite makes its whole block not finite. The bits
// are the same on every target. REQUIRES: with kUnsigned, no value is below 0. Thread rule: any thread.
void encode(std::size_t n, CodeMap map, const float* values, std::uint8_t* codes, float* scales);
void decode(std::size_t n, CodeMap map, const std::uint8_t* codes, const float* scales, float* values);

}  // namespace sluice::optim
