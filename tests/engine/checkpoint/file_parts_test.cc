#include "engine/checkpoint/file_parts.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "engine/checkpoint/file_sum.h"

namespace sluice::engine {
namespace file_parts_test {

constexpr int kEvery = FilePart::kEvery;
constexpr std::uint64_t kBlock = kStreamBlock;

TEST(FileParts, LetTheRankWriteABlockThatHasItsFirstByte) {
  const FileParts parts({{0, 100},
                         {100, kBlock + 10, 0},
                         {kBlock + 10, 3 * kBlock, 1},
                         {3 * kBlock, 3 * kBlock, 2},
                         {3 * kBlock, 3 * kBlock + 5, 2},
                         {3 * kBlock + 5, 3 * kBlock + 9, 0}},
                        3);
  EXPECT_EQ(parts.bytes(), 3 * kBlock + 9);
  ASSERT_EQ(parts.blocks(), 4u);
  EXPECT_EQ(parts.writer(0), 0);
  EXPECT_EQ(parts.writer(1), 0);
  EXPECT_EQ(parts.writer(2), 1);
  EXPECT_EQ(parts.writer(3), 2);
  EXPECT_FALSE(parts.is_split(0));
  EXPECT_TRUE(parts.is_split(1));
  EXPECT_FALSE(parts.is_split(2));
  EXPECT_TRUE(parts.is_split(3));
  EXPECT_EQ(parts.of_block(1),
            (std::vector<FilePart>{{kBlock, kBlock + 10, 0}, {kBlock + 10, 2 * kBlock, 1}}));
  EXPECT_TRUE(parts.concerns(1, kBlock, 2 * kBlock));
  EXPECT_FALSE(parts.concerns(1, 0, kBlock + 10));
  EXPECT_FALSE(parts.concerns(2, 0, 3 * kBlock));
}

TEST(FileParts, ThatAllHaveAreWrittenInEqualShares) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    const FileParts parts({{0, 7}, {7, 40 * kBlock + 3}}, ranks);
    EXPECT_FALSE(parts.any_split());
    std::vector<std::uint64_t> blocks(static_cast<std::size_t>(ranks));
    for (std::uint64_t block = 0; block < parts.blocks(); ++block) {
      ++blocks[static_cast<std::size_t>(parts.writer(block))];
      if (block > 0) {
        EXPECT_LE(parts.writer(block - 1), parts.writer(block));
      }
    }
    const auto [least, most] = std::ranges::minmax(blocks);
    EXPECT_LE(most - least, 1u);
    for (int rank = 0; rank < ranks; ++rank) EXPECT_TRUE(parts.writes(rank));
  }
  const FileParts small({{0, 10}}, 4);
  EXPECT_TRUE(small.writes(0));
  EXPECT_FALSE(small.writes(1));
  EXPECT_FALSE(small.concerns(1, 0, 10));
}

// Of a block that all have in part, its writer needs nothing from others.
TEST(FileParts, OfARankAndOfAllMakeABlockOfThatRank) {
  const FileParts parts({{0, 5, 1}, {5, 50, kEvery}}, 2);
  EXPECT_EQ(parts.writer(0), 1);
  EXPECT_FALSE(parts.any_split());
  EXPECT_TRUE(parts.concerns(1, 5, 50));
  EXPECT_FALSE(parts.concerns(0, 5, 50));
}

TEST(FileParts, ThatDoNotMakeAFileAreRefused) {
  EXPECT_THROW(FileParts({{0, 5}, {6, 7}}, 2), Error);
  EXPECT_THROW(FileParts({{1, 5}}, 2), Error);
  EXPECT_THROW(FileParts({{0, 5, 2}}, 2), Error);
  EXPECT_THROW(FileParts({{0, 5}}, 2).at(5), Error);
}

}  // namespace file_parts_test
}  // namespace sluice::engine
