#include "engine/ranks/packing.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <vector>

namespace sluice::engine {
namespace packing_test {

// 60 elements of which some are packed: pieces that touch, that are alone, at both ends, none and all.
std::vector<std::vector<Packing::Piece>> all_pieces() {
  std::vector<std::vector<Packing::Piece>> all = {
      {}, {{0, 60}}, {{0, 10}, {10, 15}, {40, 60}}, {{7, 8}, {30, 44}, {44, 44}, {59, 60}}};
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    std::vector<Packing::Piece> pieces;
    for (std::size_t at = random() % 9; at < 60; at += 1 + random() % 9) {
      const std::size_t end = std::min<std::size_t>(60, at + random() % 12);
      pieces.push_back({at, end});
      at = end;
    }
    all.push_back(pieces);
  }
  return all;
}

TEST(Packing, MovesPiecesToTheFrontAndBack) {
  for (const auto& pieces : all_pieces()) {
    const Packing packing(pieces);
    std::vector<float> array(60);
    std::iota(array.begin(), array.end(), 1.0f);
    const std::vector<float> before = array;
    std::vector<float> expected(60), front;
    for (const Packing::Piece& piece : pieces)
      for (std::size_t i = piece.begin; i < piece.end; ++i) {
        EXPECT_EQ(packing.position(i), front.size());
        front.push_back(before[i]);
        expected[i] = before[i];
      }
    ASSERT_EQ(packing.size(), front.size());
    EXPECT_EQ(packing.position(60), front.size());
    packing.pack(array.data());
    EXPECT_EQ(std::vector(array.begin(), array.begin() + static_cast<std::ptrdiff_t>(front.size())), front);
    packing.unpack(array.data(), 0, 60);
    EXPECT_EQ(array, expected);
  }
}

// A rank that has a part of the sum moves no more than that back.
TEST(Packing, MovesAPartBack) {
  for (const auto& pieces : all_pieces())
    for (std::size_t begin = 0; begin <= 60; begin += 6)
      for (std::size_t end = begin; end <= 60; end += 9) {
        const Packing packing(pieces);
        std::vector<float> whole(60);
        std::iota(whole.begin(), whole.end(), 1.0f);
        packing.pack(whole.data());
        std::vector<float> part = whole;
        for (std::size_t i = 0; i < part.size(); ++i)  // what others have of the sum is not here
          if (i < packing.position(begin) || i >= packing.position(end)) part[i] = -1;
        packing.unpack(whole.data(), 0, 60);
        packing.unpack(part.data(), begin, end);
        for (std::size_t i = begin; i < end; ++i) ASSERT_EQ(part[i], whole[i]) << begin << " " << end;
      }
}

}  // namespace packing_test
}  // namespace sluice::engine
