#include "kernels/reduce.h"

#include "core/pairwise.h"
#include "kernels/harness.h"

namespace sluice::kernels::reduce_test {
using namespace sluice::test;

// The written order, level by level: neighbours are added, an odd last one is carried.
template <class T>
T by_levels(std::vector<T> values) {
  if (values.empty()) return 0;
  while (values.size() > 1) {
    std::vector<T> next;
    for (std::size_t i = 0; i + 1 < values.size(); i += 2) next.push_back(values[i] + values[i + 1]);
    if (values.size() % 2 == 1) next.push_back(values.back());
    values = next;
  }
  return values[0];
}

double squares_in_written_order(const TestArray& x) {
  std::vector<double> blocks;
  for (std::size_t begin = 0; begin < x.size(); begin += kGridBlock) {
    std::vector<double> lanes(16);
    for (std::size_t i = begin; i < std::min(x.size(), begin + kGridBlock); ++i)
      lanes[(i - begin) % 16] += x[i] * x[i];
    blocks.push_back(by_levels(lanes));
  }
  return by_levels(blocks);
}

class Reduce : public testing::Test {
 protected:
  Threads threads_{2};
};

TEST_F(Reduce, PairwiseSumIsTheSumByLevels) {
  for (std::size_t n = 0; n < 70; ++n) {
    const std::vector<float> values = random_values(n, static_cast<unsigned>(n));
    EXPECT_EQ(pairwise_sum(std::span<const float>(values)), by_levels(values)) << n;
  }
}

TEST_F(Reduce, SquaresAreAddedInTheWrittenOrder) {
  for (const Dtype type : kFloatTypes)
    for (const std::size_t n : {0u, 1u, 15u, 16u, 17u, 1024u, 1025u, 5 * 1024u + 3, 65536u * 3 + 100}) {
      const TestArray x(type, random_values(n, 4));
      const SquareSum result = sum_of_squares(threads_, 0, n, x);
      EXPECT_EQ(result.sum.total(), squares_in_written_order(x)) << n;
      EXPECT_TRUE(result.finite);
    }
}

TEST_F(Reduce, SquaresOfWhatIsStoredAreThoseOfASecondPass) {
  for (const Dtype type : kFloatTypes)
    for (const std::size_t n : {1u, 15u, 17u, 4097u, 65536u * 3 + 100}) {
      const TestArray x(type, random_values(n, 4)), before(Dtype::kF32, random_values(n, 5));
      for (const bool accumulate : {false, true}) {
        TestArray to = before;
        const SquareSum result = store_summing_squares(threads_, 0, n, x, accumulate, to.f32());
        expect_close(
            to,
            [&](auto i) {
              return double{static_cast<float>(accumulate ? before[i] : 0) + static_cast<float>(x[i])};
            },
            0, 0, "stored");
        EXPECT_EQ(result.sum.total(), sum_of_squares(threads_, 0, n, to).sum.total()) << n;
        EXPECT_TRUE(result.finite);
      }
    }
  float nan = std::numeric_limits<float>::quiet_NaN(), stored = 1;
  EXPECT_FALSE(store_summing_squares(threads_, 0, 1, {&nan, Dtype::kF32}, true, &stored).finite);
}

// Cuts of an array of n elements into parts, each at a block of the grid.
std::vector<std::vector<std::size_t>> cuts_of(std::size_t n) {
  std::vector<std::vector<std::size_t>> all = {{0, n}};
  std::mt19937 random(1);
  for (int i = 0; i < 30; ++i) {
    std::vector<std::size_t> cuts = {0, n};
    for (std::size_t parts = random() % 7; parts > 0; --parts)
      cuts.push_back(random() % (n / kGridBlock) * kGridBlock);
    std::ranges::sort(cuts);
    all.push_back(cuts);
  }
  return all;
}

TEST_F(Reduce, NoCutIntoPartsChangesASumOfSquares) {
  for (const std::size_t n : {5 * 1024u + 3, 700 * 1024u, 65536u * 3 + 100}) {
    const TestArray x(Dtype::kF32, random_values(n, 4));
    const double whole = sum_of_squares(threads_, 0, n, x).sum.total();
    for (const std::vector<std::size_t>& cuts : cuts_of(n)) {
      PartialSum sum;
      for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
        const ConstArray part = ConstArray(x).at(cuts[i]);
        sum.add(sum_of_squares(threads_, cuts[i], cuts[i + 1] - cuts[i], part).sum);
      }
      EXPECT_EQ(sum.total(), whole) << n << " elements in " << cuts.size() - 1 << " parts";
    }
  }
}

TEST(PartialSum, KeepsNoMoreNodesThanTheTreeHasLevelsOnEachSide) {
  PartialSum part(3);
  for (std::size_t leaf = 3; leaf < 1000; ++leaf) part.add(1);
  EXPECT_EQ(part.total(), 997);
  EXPECT_LE(part.nodes().size(), 18u);
  EXPECT_EQ(part.end(), 1000u);
}

TEST(PartialSum, ItsNodesAreThoseOfNodeLevelsPutTogether) {
  for (const std::size_t first : {0, 1, 6, 64, 1000})
    for (const std::size_t count : {0, 1, 2, 5, 64, 65, 1000, 1024})
      for (const std::uint8_t most : {0, 3, 10}) {
        PartialSum of_leaves(first), of_nodes(first);
        for (std::size_t i = 0; i < count; ++i) of_leaves.add(1);
        for (const std::uint8_t level : node_levels(first, count, most)) {
          EXPECT_LE(level, most);
          of_nodes.add({static_cast<double>(1 << level), level});
        }
        EXPECT_EQ(of_nodes.nodes(), of_leaves.nodes()) << count << " from " << first << ", up to " << +most;
        EXPECT_EQ(of_nodes.end(), of_leaves.end());
      }
}

TEST(PartialSum, RefusesPartsThatDoNotFollowEachOther) {
  PartialSum first, second(4);
  first.add(1);
  second.add(1);
  EXPECT_THROW(first.add(second), Error);
  EXPECT_THROW(first.add({1, 1}), Error) << "two leaves cannot be one node from leaf 1 on";
}

TEST_F(Reduce, FindsValuesThatAreNotFinite) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float bad : {kInf, -kInf, std::numeric_limits<float>::quiet_NaN()})
    for (const std::size_t where : {0u, 17u, 99999u}) {
      std::vector<float> values = random_values(100000, 1);
      values[where] = bad;
      EXPECT_FALSE(sum_of_squares(threads_, 0, values.size(), TestArray(Dtype::kF32, values)).finite)
          << where;
    }
  const TestArray large(Dtype::kF32, std::vector<float>(100, std::numeric_limits<float>::max()));
  EXPECT_TRUE(sum_of_squares(threads_, 0, 100, large).finite);
}

TEST_F(Reduce, ColumnSumsInBlocksOfRows) {
  for (const Dtype type : kFloatTypes)
    for (const std::size_t rows : {0, 1, 63, 64, 65, 300})
      for (const std::size_t width : {1, 17, 256, 700}) {
        const TestArray x(type, random_values(rows * width, 5));
        const std::vector<float> before = random_values(width, 6);
        TestArray out(Dtype::kF32, width), added(Dtype::kF32, before);
        std::vector<std::byte> workspace(column_sum_workspace(rows, width));
        column_sum(threads_, rows, width, x, out.f32(), false, workspace.data());
        column_sum(threads_, rows, width, x, added.f32(), true, workspace.data());
        const auto expected = [&](std::size_t column) {
          std::vector<float> blocks;
          for (std::size_t row = 0; row < rows; ++row) {
            const auto value = static_cast<float>(x[row * width + column]);
            if (row % 64 == 0)
              blocks.push_back(value);
            else
              blocks.back() += value;
          }
          return by_levels(blocks);
        };
        expect_close(
            out, [&](auto i) { return double{expected(i)}; }, 0, 0, "overwritten");
        expect_close(
            added, [&](auto i) { return double{before[i] + expected(i)}; }, 0, 0, "added to");
      }
}

TEST(SameBits, Reduce) {
  for (const Dtype type : kFloatTypes)
    expect_same_bits([type](Threads& threads) {
      const std::size_t rows = 300, width = 701;
      const TestArray x(type, random_values(rows * width, 5));
      TestArray out(Dtype::kF32, width);
      std::vector<std::byte> workspace(column_sum_workspace(rows, width));
      column_sum(threads, rows, width, x, out.f32(), false, workspace.data());
      TestArray stored(Dtype::kF32, rows * width);
      const double sum = sum_of_squares(threads, 0, rows * width, x).sum.total() +
                         store_summing_squares(threads, 0, rows * width, x, true, stored.f32()).sum.total();
      Bytes bytes(sizeof sum);
      std::memcpy(bytes.data(), &sum, sizeof sum);
      return out.bytes() + bytes;
    });
}

}  // namespace sluice::kernels::reduce_test
