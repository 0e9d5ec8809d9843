#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "optim/eight_bit.h"

// The code tables of docs/optimizers.md, "State in 8 bits", in a form for vectors. Private to this room.
namespace sluice::optim {

// Each code has an integer *number*. For kSigned it is the code itself, from -128 to 127; for kUnsigned it is
// the code plus 1. The magnitudes for the numbers from 2^k to 2^(k+1) lie on a straight line, one for each of
// kLines values of k.
struct CodeTable {
  static constexpr std::size_t kLines = 7;
  static constexpr std::size_t kLookup = 16;  // the lanes of the widest vector

  std::array<float, 256> values = {};  // the value of each code

  // |value| = number * slope + offset, with the slope and offset at index (exponent of the number as f32)
  // modulo 8. Numbers outside the lines (128, and for kUnsigned 1 and 256) have entries of their own. The
  // kSigned number 0 is handled separately.
  alignas(64) std::array<float, kLookup> slopes = {}, offsets = {};

  // The minimum of these lines at |x|, rounded to nearest, is the number (for kUnsigned, the code).
  std::array<float, kLines> inverse_slopes = {}, inverse_offsets = {};
};
const CodeTable& code_table(CodeMap map);

// The smallest scale of a block that is not all zero, so that no code decodes to a subnormal number.
inline constexpr float kLeastScale = 0x1p-100f;

// Returns the scale of a block whose largest magnitude is `most` and whose greatest value is `greatest`: the
// value of that magnitude, with its sign (positive where both signs occur) and at least kLeastScale in
// magnitude. It is not finite where any value of the block is not.
constexpr float scale_of_block(float most, float greatest) {
  if (most == 0) return 0;
  if (most < kLeastScale) return kLeastScale;
  if (most != most) return std::numeric_limits<float>::quiet_NaN();
  if (most == std::numeric_limits<float>::infinity()) return most;
  return greatest == most ? most : -most;
}

}  // namespace sluice::optim
