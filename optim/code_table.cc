#include "optim/code_table.h"

#include <cmath>

namespace sluice::optim {
namespace {

// Powers of ten up to 10^7 are exact, so that a division by one rounds only once.
double power_of_ten(std::size_t exponent) {
  double power = 1;
  for (; exponent > 0; --exponent) power *= 10;
  return power;
}

// Returns the index of the line for numbers from 2^k on: the exponent of an f32 is k + 127.
std::size_t lookup_of(std::size_t k) { return (k + 127) % 8; }

// Adds the line for numbers from 2^k on: the midpoints of 2^k equal parts of (0.1 / unit, 1 / unit].
void add_line(std::size_t k, double unit, float number_of_code_0, CodeTable& table) {
  const auto parts = static_cast<double>(std::size_t{1} << k);
  const std::size_t line = lookup_of(k);
  table.slopes[line] = static_cast<float>(0.9 / (unit * parts));
  table.offsets[line] = static_cast<float>((0.45 / parts - 0.8) / unit);
  const std::size_t at = k % CodeTable::kLines;
  // A nudge, so that rounding cannot leave the value 1 below its number.
  constexpr double kNudge = 0x1p-12;
  table.inverse_slopes[at] = static_cast<float>(parts * unit / 0.9);
  table.inverse_offsets[at] = static_cast<float>(parts * 8 / 9 - 0.5 - number_of_code_0 + kNudge);
}

float value_of(const CodeTable& table, float number) {
  int exponent = 0;
  std::frexp(number, &exponent);
  const std::size_t line = lookup_of(static_cast<std::size_t>(exponent - 1));
  return std::fma(number, table.slopes[line], table.offsets[line]);
}

// Repeats the lines of 8 exponents for the lanes of the widest vector.
void repeat_lines(CodeTable& table) {
  for (std::size_t i = 8; i < CodeTable::kLookup; ++i) {
    table.slopes[i] = table.slopes[i - 8];
    table.offsets[i] = table.offsets[i - 8];
  }
}

CodeTable signed_table() {
  CodeTable table;
  for (std::size_t k = 0; k < CodeTable::kLines; ++k) add_line(k, power_of_ten(6 - k), 0, table);
  table.slopes[lookup_of(7)] = -0x1p-7f;  // the number -128 encodes 1
  for (std::size_t number = 1; number < 128; ++number) {
    const float value = value_of(table, static_cast<float>(number));
    table.values[number] = value;
    table.values[256 - number] = -value;
  }
  table.values[128] = 1;
  repeat_lines(table);
  return table;
}

CodeTable unsigned_table() {
  CodeTable table;
  for (std::size_t k = 1; k <= CodeTable::kLines; ++k) add_line(k, power_of_ten(7 - k), 1, table);
  const std::size_t ends = lookup_of(0);  // shared by the numbers 1 and 256
  table.slopes[ends] = 1.0f / 255;
  table.offsets[ends] = -table.slopes[ends];
  for (std::size_t code = 0; code < 256; ++code)
    table.values[code] = value_of(table, static_cast<float>(code + 1));
  repeat_lines(table);
  return table;
}

}  // namespace

const CodeTable& code_table(CodeMap map) {
  static const CodeTable with_sign = signed_table(), without = unsigned_table();
  return map == CodeMap::kSigned ? with_sign : without;
}

std::span<const float, 256> code_values(CodeMap map) { return code_table(map).values; }

}  // namespace sluice::optim
