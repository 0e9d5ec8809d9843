#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "optim/eight_bit.h"

// The numbers of docs/optimizers.md, "State in 8 bits", as vectors use them. Private to this room.
namespace sluice::optim {

// A code's number is a whole one: with kSigned the code itself, from -127 to 127, and -128; with kUnsigned
// the code and 1. From 2^k to 2^(k+1) the magnitudes that they stand for lie on a line, for each of kLines
// powers.
struct CodeTable {
  static constexpr std::size_t kLines = 7;
  static constexpr std::size_t kLookup = 16;  // as many as the widest vector has lanes

  std::array<float, 256> values = {};  // of each code

  // |value| = number * slope + offset, with those at the exponent of the number, modulo 8; what has no line
  // is made to lie on one: 1, and with kUnsigned 0. (With kSigned a number of 0 has to be told apart.)
  alignas(64) std::array<float, kLookup> slopes = {}, offsets = {};

  // The least of these lines at |x|, rounded to nearest, is the number, or with kUnsigned the code.
  std::array<float, kLines> inverse_slopes = {}, inverse_offsets = {};
};
const CodeTable& code_table(CodeMap map);

// A magnitude that is not zero is scaled by no less, so that what codes stand for are no subnormal numbers.
inline constexpr float kLeastScale = 0x1p-100f;

}  // namespace sluice::optim
