#include "core/random.h"
#include "testing.h"

namespace sluice::random_test {

using Words = std::array<std::uint32_t, 4>;

// The known-answer vectors that the generator's authors publish with Random123 (kat_vectors, philox4x32 10
// and 7).
TEST(Philox, PublishedVectors) {
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));

  EXPECT_EQ(philox<7>({0, 0, 0, 0}, {0, 0}), (Words{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}));
  EXPECT_EQ(philox<7>({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Words{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}));
  EXPECT_EQ(philox<7>({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}));
}

TEST(CounterRandom, BlockIsPhiloxOfIndexStreamAndSeed) {
  const CounterRandom random(0x299f31d0a4093822u, 0x0370734413198a2eu);
  EXPECT_EQ(random.block(0x85a308d3243f6a88u), (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(CounterRandom, SeedsStreamsAndBlocksDiffer) {
  std::set<Words> seen;
  for (std::uint64_t seed : {0ull, 1ull, 1ull << 32})
    for (std::uint64_t stream : {0ull, 1ull, 1ull << 32})
      for (std::uint64_t block : {0ull, 1ull, 1ull << 32})
        seen.insert(CounterRandom(seed, stream).block(block));
  EXPECT_EQ(seen.size(), 27u);
}

TEST(ToUnitInterval, EndsAndMean) {
  EXPECT_EQ(to_unit_interval(0), 0.0f);
  EXPECT_EQ(to_unit_interval(0xffffffffu), 1.0f - 0x1p-24f);
  EXPECT_EQ(to_unit_interval(0x80000000u), 0.5f);
  double sum = 0;
  const CounterRandom random(3, 5);
  for (std::uint64_t i = 0; i < 10'000; ++i)
    for (const std::uint32_t word : random.block(i)) sum += static_cast<double>(to_unit_interval(word));
  EXPECT_NEAR(sum / 40'000, 0.5, 0.006);  // four standard deviations
}

}  // namespace sluice::random_test
