#pragma once
#include <cstddef>
#include <cstdint>
#include <span>

// 8-bit quantization: a code for each element, and an f32 scale for each block of elements (Dettmers et al.
// 2022, "8-bit Optimizers via Block-wise Quantization", sections 2 and 3). docs/optimizers.md explains the
// codes.
namespace sluice::optim {

// The number of elements that share a scale. Blocks are counted from the parameter's first element.
inline constexpr std::size_t kScaleBlock = 256;

// kSigned codes represent values of both signs; kUnsigned codes represent values from 0 on, in finer steps.
enum class CodeMap : std::uint8_t { kSigned, kUnsigned };

// Returns the value of each code before it is multiplied by its block's scale. The table lives for ever.
std::span<const float, 256> code_values(CodeMap map);

// codes are [n], with a scale for each block of kScaleBlock elements (the last may have fewer). encode()
// rounds to nearest, ties towards 0, except that a kUnsigned value above 0 stays above 0. Encoding the result
// of decode() gives the same codes. A value that is not finite makes its whole block not finite. The bits are
// the same on every target. REQUIRES: with kUnsigned, no value is below 0. Thread rule: any thread.
void encode(std::size_t n, CodeMap map, const float* values, std::uint8_t* codes, float* scales);
void decode(std::size_t n, CodeMap map, const std::uint8_t* codes, const float* scales, float* values);

}  // namespace sluice::optim
