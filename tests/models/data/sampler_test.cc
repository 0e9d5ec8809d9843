#include "models/data/sampler.h"

#include "models/data/data_test_support.h"

namespace sluice::models::sampler_test {

using Numbers = std::vector<std::uint64_t>;

TEST(Permutation, HasTheDocumentedValues) {
  // The numbers were computed in Python from docs/formats/tokens.md.
  const auto start = [](std::uint64_t size, std::uint64_t seed, std::uint64_t number, std::size_t count) {
    Numbers values;
    for (std::uint64_t i = 0; i < count; ++i) values.push_back(Permutation(size, seed, number)(i));
    return values;
  };
  EXPECT_EQ(start(1000, 42, 0, 6), (Numbers{59, 241, 97, 183, 729, 133}));
  EXPECT_EQ(start(1000, 42, 1, 6), (Numbers{335, 26, 884, 581, 573, 485}));
  EXPECT_EQ(start(std::uint64_t{1} << 33, (std::uint64_t{7} << 32) | 5, (std::uint64_t{3} << 32) | 9, 4),
            (Numbers{8504819933, 5740040761, 7245498195, 1228323936}));
}

TEST(Permutation, VisitsEverythingOnce) {
  for (const std::uint64_t size : {1, 2, 3, 5, 16, 17, 255, 256, 257, 1000, 4096, 65537})
    for (std::uint64_t number = 0; number < 3; ++number) {
      std::vector<bool> seen(size, false);
      const Permutation permutation(size, 99, number);
      for (std::uint64_t i = 0; i < size; ++i) {
        const std::uint64_t image = permutation(i);
        ASSERT_LT(image, size);
        ASSERT_FALSE(seen[image]) << size << " " << i;
        seen[image] = true;
      }
    }
}

// Takes chi-squared of where a position goes, over many numbers, which may be 5 deviations above its mean.
TEST(Permutation, IsUniform) {
  for (const std::uint64_t size : {3u, 10u, 100u}) {
    const std::uint64_t trials = 200 * size;
    std::vector<double> counts(size, 0.0);
    for (std::uint64_t number = 0; number < trials; ++number)
      counts[Permutation(size, 7, number)(size / 2)] += 1.0;
    double chi = 0.0;
    for (const double count : counts) chi += (count - 200.0) * (count - 200.0) / 200.0;
    const double freedom = static_cast<double>(size - 1);
    EXPECT_LT(chi, freedom + 5.0 * std::sqrt(2.0 * freedom)) << size;
  }
}

// Shuffled neighbours have a mean distance of a third of the size.
TEST(Permutation, SeparatesNeighbours) {
  constexpr std::uint64_t kSize = 10'000;
  const Permutation permutation(kSize, 5, 0);
  double sum = 0.0;
  for (std::uint64_t i = 0; i + 1 < kSize; ++i)
    sum += std::abs(static_cast<double>(permutation(i)) - static_cast<double>(permutation(i + 1)));
  EXPECT_NEAR(sum / (kSize - 1), kSize / 3.0, kSize * 0.01);
}

TEST(Sampler, EachEpochVisitsEveryWindowInAnotherOrder) {
  const Sampler sampler({10, 50}, 3);
  Numbers first, second, all(50);
  std::iota(all.begin(), all.end(), 10);
  for (std::uint64_t i = 0; i < 50; ++i) {
    first.push_back(sampler.window(i));
    second.push_back(sampler.window(50 + i));
  }
  EXPECT_NE(first, second);
  EXPECT_NE(first, all);
  for (Numbers* epoch : {&first, &second}) {
    std::sort(epoch->begin(), epoch->end());
    EXPECT_EQ(*epoch, all);
  }
  Numbers other;
  for (std::uint64_t i = 0; i < 50; ++i) other.push_back(Sampler({10, 50}, 4).window(i));
  EXPECT_NE(other, first);
  EXPECT_EQ(Sampler({10, 50}, 3, Sampler::Order::kInOrder).window(51), 11u);
}

TEST_F(DataTest, WindowsAreSplitAtTheEnd) {
  auto source = open_tokens({store("a", std::string(101, 'x'))});
  const auto split = [&](std::uint64_t sequence, double held_out) {
    return split_windows(*source, sequence, held_out);
  };
  EXPECT_EQ(split(10, 0.0).train.count, 10u);
  EXPECT_EQ(split(10, 0.0).held_out.count, 0u);
  EXPECT_EQ(split(10, 0.25).train.count, 8u);
  EXPECT_EQ(split(10, 0.25).held_out.first, 8u);
  EXPECT_EQ(split(10, 0.25).held_out.count, 2u);
  EXPECT_EQ(split(10, 0.001).held_out.count, 1u);
  EXPECT_EQ(split(10, 0.999).train.count, 1u);
  EXPECT_EQ(split(100, 0.0).train.count, 1u);
  EXPECT_EQ(split(11, 0.0).train.count, 9u);
}

TEST_F(DataTest, TooShortTextSaysWhatIsNeeded) {
  auto source = open_tokens({store("a", std::string(100, 'x'))});
  expect_error(ErrorCode::kInvalidArgument, {path("a"), "100 tokens", "at least 101"},
               [&] { split_windows(*source, 100, 0.0); });
  expect_error(ErrorCode::kInvalidArgument, {path("a"), "100 tokens", "held out", "at least 101"},
               [&] { split_windows(*source, 50, 0.1); });
  EXPECT_EQ(split_windows(*source, 49, 0.1).train.count, 1u);
  for (const double fraction : {-0.1, 1.0, std::nan("")})
    expect_error(ErrorCode::kInvalidArgument, {"fraction"}, [&] { split_windows(*source, 10, fraction); });
}

TEST_F(DataTest, BatchesAreWindowsWithTheirNextTokens) {
  std::vector<std::uint16_t> tokens(1000);
  std::iota(tokens.begin(), tokens.end(), 0);
  auto source = open_tokens({store("a.bin", raw(tokens))});
  const Sampler sampler(split_windows(*source, 7, 0.0).train, 11);
  std::vector<std::int32_t> inputs(5 * 7), targets(5 * 7);
  fill_batch(*source, sampler, 140, 7, inputs, targets);  // goes over an epoch's end: there are 142 windows
  ASSERT_EQ(sampler.windows(), 142u);
  for (std::uint64_t row = 0; row < 5; ++row)
    for (std::uint64_t i = 0; i < 7; ++i) {
      EXPECT_EQ(inputs[row * 7 + i], static_cast<std::int32_t>(sampler.window(140 + row) * 7 + i));
      EXPECT_EQ(targets[row * 7 + i], inputs[row * 7 + i] + 1);
    }
}

// A run that is resumed at its next sample sees the same samples as one that was never stopped.
TEST_F(DataTest, ResumesAtItsNextSample) {
  std::string text;
  for (int i = 0; i < 500; ++i) text += static_cast<char>(' ' + i * i % 90);
  auto source = open_tokens({store("a", text)});
  const Sampler whole(split_windows(*source, 9, 0.2).train, 21);
  std::vector<std::int32_t> inputs(100 * 9), targets(100 * 9);
  fill_batch(*source, whole, 0, 9, inputs, targets);
  auto reopened = open_tokens({path("a")});
  const Sampler resumed(split_windows(*reopened, 9, 0.2).train, 21);
  std::vector<std::int32_t> rest(37 * 9), rest_targets(37 * 9);
  fill_batch(*reopened, resumed, 63, 9, rest, rest_targets);
  EXPECT_TRUE(std::equal(rest.begin(), rest.end(), inputs.begin() + 63 * 9));
  EXPECT_TRUE(std::equal(rest_targets.begin(), rest_targets.end(), targets.begin() + 63 * 9));
}

}  // namespace sluice::models::sampler_test
