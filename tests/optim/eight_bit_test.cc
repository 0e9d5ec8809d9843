#include "optim/eight_bit.h"

#include "kernels/harness.h"
#include "testing.h"

namespace sluice::optim::eight_bit_test {
using namespace sluice::test;

constexpr CodeMap kMaps[] = {CodeMap::kSigned, CodeMap::kUnsigned};

// The magnitudes that the paper describes, built otherwise than in the source: the middles of equal parts of
// [0.1, 1] for each power of ten, in f64 and in ascending order.
std::vector<double> magnitudes(CodeMap map) {
  std::vector<double> all = {0, 1};
  for (int e = 0; e < 7; ++e) {
    const int parts = 1 << ((map == CodeMap::kSigned ? 6 : 7) - e);
    const double width = 0.9 / parts;
    for (int j = 0; j < parts; ++j) all.push_back(std::pow(10.0, -e) * (0.1 + (j + 0.5) * width));
  }
  std::sort(all.begin(), all.end());
  return all;
}

struct Coded {
  std::vector<std::uint8_t> codes;
  std::vector<float> scales;
  explicit Coded(std::size_t n) : codes(n), scales((n + kScaleBlock - 1) / kScaleBlock) {}
};

Coded encoded(CodeMap map, const std::vector<float>& values) {
  Coded result(values.size());
  encode(values.size(), map, values.data(), result.codes.data(), result.scales.data());
  return result;
}

std::vector<float> decoded(CodeMap map, const Coded& from) {
  std::vector<float> values(from.codes.size());
  decode(values.size(), map, from.codes.data(), from.scales.data(), values.data());
  return values;
}

std::vector<float> round_trip(CodeMap map, const std::vector<float>& values) {
  return decoded(map, encoded(map, values));
}

// Makes values over many powers of ten, of both signs where the map has them.
std::vector<float> wide_values(CodeMap map, std::size_t n, unsigned seed) {
  std::vector<float> values = random_values(n, seed), powers = random_values(n, seed + 1);
  for (std::size_t i = 0; i < n; ++i) values[i] *= std::pow(10.0f, 2 * powers[i]);
  if (map == CodeMap::kUnsigned)
    for (float& value : values) value = std::abs(value);
  return values;
}

TEST(EightBit, CodesStandForThePapersValues) {
  for (const CodeMap map : kMaps) {
    const std::vector<double> expected = magnitudes(map);
    ASSERT_EQ(expected.size(), map == CodeMap::kSigned ? 129u : 256u);
    const auto values = code_values(map);
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_NEAR(values[i], expected[i], 1e-6 * expected[i]) << i;
    EXPECT_EQ(values[0], 0);
    EXPECT_EQ(values[map == CodeMap::kSigned ? 128 : 255], 1);
    if (map == CodeMap::kUnsigned) continue;
    for (std::size_t i = 1; i < 128; ++i) EXPECT_EQ(values[256 - i], -values[i]);
  }
}

// Finds the equal part of [0.1, 1] times a power of ten in which a magnitude lies, and returns its middle, in
// f64. Below all parts it returns 0, or the least middle for a map without signs.
double middle_of(CodeMap map, double x) {
  for (int e = 0; e < 7; ++e) {
    const double top = std::pow(10.0, -e);
    if (x < 0.1 * top) continue;
    const int parts = 1 << ((map == CodeMap::kSigned ? 6 : 7) - e);
    const double part = std::floor((x / top - 0.1) / 0.9 * parts);
    return x >= 1 ? 1 : top * (0.1 + 0.9 * (std::min<double>(part, parts - 1) + 0.5) / parts);
  }
  return map == CodeMap::kSigned || x == 0 ? 0 : magnitudes(map)[1];
}

// Says whether a part's border is so near that f32 arithmetic may find the other part.
bool is_border(CodeMap map, double x) {
  return middle_of(map, x * (1 - 1e-5)) != middle_of(map, x * (1 + 1e-5)) || x > 1 - 1e-5;
}

TEST(EightBit, EncodesToTheMiddleOfTheInterval) {
  for (const CodeMap map : kMaps) {
    const auto table = code_values(map);
    const std::vector<float> values = wide_values(map, 40 * kScaleBlock + 77, 3);
    const Coded found = encoded(map, values);
    std::size_t borders = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::size_t begin = i / kScaleBlock * kScaleBlock,
                        end = std::min(begin + kScaleBlock, values.size());
      const float scale = *std::max_element(values.begin() + static_cast<long>(begin),
                                            values.begin() + static_cast<long>(end),
                                            [](float a, float b) { return std::abs(a) < std::abs(b); });
      ASSERT_EQ(found.scales[i / kScaleBlock], scale);
      const double x = double{values[i]} / scale, value = table[found.codes[i]];
      if (values[i] == scale) {
        ASSERT_EQ(value, 1);
      } else if (is_border(map, std::abs(x))) {
        ++borders;
      } else {
        const double middle = middle_of(map, std::abs(x));
        ASSERT_NEAR(value, std::copysign(middle, x), 1e-6 * middle) << i << ": " << x;
      }
    }
    EXPECT_LT(borders, values.size() / 100);
  }
}

TEST(EightBit, EveryCodeIsDecodedToItsValueTimesTheScale) {
  Coded all(256);
  for (std::size_t i = 0; i < 256; ++i) all.codes[i] = static_cast<std::uint8_t>(i);
  for (const CodeMap map : kMaps)
    for (const std::int64_t target : targets()) {
      const OnTarget scope(target);
      for (const float scale : {1.0f, -3.7f}) {
        all.scales[0] = scale;
        const std::vector<float> found = decoded(map, all);
        for (std::size_t i = 0; i < 256; ++i) ASSERT_EQ(found[i], code_values(map)[i] * scale) << i;
      }
    }
}

// docs/optimizers.md states these bounds.
TEST(EightBit, ErrorsAreBounded) {
  for (const CodeMap map : kMaps) {
    const double of_largest = map == CodeMap::kSigned ? 0.0071 : 0.0036;
    const double of_value = map == CodeMap::kSigned ? 0.071 : 0.036;
    const std::vector<float> values = wide_values(map, 100 * kScaleBlock, 9);
    const Coded coded = encoded(map, values);
    const std::vector<float> found = decoded(map, coded);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double largest = std::abs(coded.scales[i / kScaleBlock]), error = std::abs(found[i] - values[i]);
      EXPECT_LE(error, of_largest * largest);
      if (std::abs(values[i]) >= 0.1 * largest) {
        EXPECT_LE(error, of_value * std::abs(values[i]));
      }
    }
  }
}

// The border between two parts is half-way between their middles, within the error of f32 arithmetic.
TEST(EightBit, BordersAreWhereIntervalsEnd) {
  for (const CodeMap map : kMaps)
    for (int e = 0; e < 7; ++e) {
      const int parts = 1 << ((map == CodeMap::kSigned ? 6 : 7) - e);
      for (int j = 0; j < parts; ++j) {
        const double part = std::pow(10.0, -e) * 0.9 / parts, border = std::pow(10.0, -e) * 0.1 + part * j;
        const auto below = static_cast<float>(border - part / 1000),
                   above = static_cast<float>(border + part / 1000);
        const Coded found = encoded(map, {1, below, above, map == CodeMap::kSigned ? -above : above});
        const auto low = found.codes[1], high = found.codes[2];
        const bool least = e == 6 && j == 0;
        ASSERT_EQ(high - low, least && map == CodeMap::kUnsigned ? 0 : 1) << e << " " << j;
        ASSERT_EQ(found.codes[3], map == CodeMap::kSigned ? 256 - high : high);
      }
    }
}

TEST(EightBit, TheLargestValueIsExactWhateverItsSign) {
  for (const float largest : {3.7f, -3.7f}) {
    const std::vector<float> values = round_trip(CodeMap::kSigned, {0.1f, largest, -0.2f, 0});
    EXPECT_EQ(values[1], largest);
    EXPECT_EQ(values[3], 0);
    EXPECT_NEAR(values[0], 0.1f, 0.006f);  // within half a part of its power of ten
    EXPECT_NEAR(values[2], -0.2f, 0.006f);
  }
  EXPECT_GT(encoded(CodeMap::kSigned, {-2, 2, 1}).scales[0], 0);  // the positive sign is taken
}

TEST(EightBit, DecodedValuesAreEncodedToTheSameCodes) {
  for (const CodeMap map : kMaps)
    for (const float factor : {1.0f, 1e-27f, 1e-30f, 1e-42f, 1e30f}) {
      std::vector<float> values = wide_values(map, 50 * kScaleBlock + 3, 5);
      for (float& value : values) value *= factor;
      const std::vector<float> once = round_trip(map, values);
      EXPECT_EQ(round_trip(map, once), once) << factor;
    }
}

TEST(EightBit, ASecondMomentThatIsNotZeroStaysAboveZero) {
  const std::vector<float> values = round_trip(CodeMap::kUnsigned, {1, 1e-12f, 0});
  EXPECT_GT(values[1], 0);
  EXPECT_EQ(values[2], 0);
  EXPECT_EQ(round_trip(CodeMap::kSigned, {1, 1e-12f, 0})[1], 0);
}

TEST(EightBit, ZerosAreZeroBytes) {
  for (const CodeMap map : kMaps) {
    const Coded found = encoded(map, std::vector<float>(300, -0.0f));
    EXPECT_EQ(found.codes, std::vector<std::uint8_t>(300, 0));
    EXPECT_EQ(std::bit_cast<std::uint32_t>(found.scales[0]), 0u);
    EXPECT_EQ(decoded(map, Coded(300)), std::vector<float>(300, 0));
  }
}

TEST(EightBit, AnInfinityOrNanSpreadsOverItsBlockAndNoOther) {
  for (const CodeMap map : kMaps)
    for (const float bad : {HUGE_VALF, -HUGE_VALF, NAN}) {
      if (map == CodeMap::kUnsigned && bad < 0) continue;
      std::vector<float> values(3 * kScaleBlock, 0.5f);
      values[kScaleBlock + 9] = bad;
      const std::vector<float> found = round_trip(map, values);
      for (std::size_t i = 0; i < found.size(); ++i)
        EXPECT_EQ(std::isfinite(found[i]), i / kScaleBlock != 1) << i;
    }
}

TEST(EightBit, SameBits) {
  for (const CodeMap map : kMaps)
    for (const std::size_t n : kSizes) {
      std::vector<float> values = wide_values(map, n, 7);
      if (n > 600) values[300] = NAN;
      expect_same_bits([&](Threads&) {
        const Coded found = encoded(map, values);
        const std::vector<float> back = decoded(map, found);
        return TestArray(Dtype::kF32, found.scales).bytes() + Bytes(found.codes.begin(), found.codes.end()) +
               TestArray(Dtype::kF32, back).bytes();
      });
    }
}

}  // namespace sluice::optim::eight_bit_test
