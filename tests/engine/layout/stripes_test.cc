#include "engine/layout/stripes.h"

#include "core/bytes.h"
#include "kernels/grid.h"
#include "testing.h"

namespace sluice::engine::stripes_test {
namespace {

using kernels::kGridBlock;

// Up to eight shards of a unit, some of which may be empty.
std::vector<ElementRange> some_shards(std::mt19937& random) {
  const std::size_t count = 1 + random() % 8, blocks = 1 + random() % 60;
  std::vector<std::size_t> borders = {0, blocks};
  for (std::size_t i = 1; i < count; ++i) borders.push_back(random() % (blocks + 1));
  std::ranges::sort(borders);
  std::vector<ElementRange> shards;
  for (std::size_t i = 0; i < count; ++i)
    shards.push_back({borders[i] * kGridBlock, borders[i + 1] * kGridBlock});
  return shards;
}

const ElementRange& shard_of(const std::vector<ElementRange>& shards, std::size_t element) {
  return *std::ranges::find_if(shards,
                               [&](const ElementRange& s) { return s.begin <= element && element < s.end; });
}

// By block of the unit, the stripe that has it.
std::vector<std::size_t> stripes_by_block(const std::vector<Stripe>& stripes, std::size_t elements) {
  std::vector<std::size_t> all(divide_up(elements, kGridBlock), SIZE_MAX);
  for (std::size_t i = 0; i < stripes.size(); ++i)
    for (const Stripe::Part& part : stripes[i].parts)
      for (std::size_t at = part.elements.begin; at < part.elements.end; at += kGridBlock) {
        EXPECT_EQ(all[at / kGridBlock], SIZE_MAX) << "block " << at / kGridBlock << " is in two stripes";
        all[at / kGridBlock] = i;
      }
  return all;
}

TEST(Stripes, HaveEachElementOnceAndFitInTheirMemory) {
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    const std::vector<ElementRange> shards = some_shards(random);
    const std::size_t most = (shards.size() + random() % 20) * kGridBlock + random() % kGridBlock;
    const std::vector<Stripe> stripes = stripes_of(shards, most);
    for (const Stripe& stripe : stripes)
      for (std::size_t part = 0; part < stripe.parts.size(); ++part) {
        const auto& [elements, at] = stripe.parts[part];
        EXPECT_EQ(elements.begin % kGridBlock, 0u);
        EXPECT_EQ(at % kGridBlock, 0u);
        EXPECT_LE(elements.end, shard_of(shards, elements.begin).end);
        EXPECT_LE(at + elements.size(), part + 1 < stripe.parts.size() ? stripe.parts[part + 1].at : most);
      }
    const std::vector<std::size_t> all = stripes_by_block(stripes, shards.back().end);
    EXPECT_EQ(std::ranges::count(all, SIZE_MAX), 0);
  }
}

// All ranks have equally much to do with each stripe, as far as their shards go.
TEST(Stripes, HaveEquallyManyElementsOfEachShard) {
  const std::vector<ElementRange> shards = {{0, 8192}, {8192, 8192}, {8192, 14336}, {14336, 22528}};
  const std::vector<Stripe> stripes = stripes_of(shards, 10000);
  ASSERT_EQ(stripes.size(), 3u);
  const auto elements = [](const Stripe& stripe) {
    std::vector<ElementRange> all;
    for (const Stripe::Part& part : stripe.parts) all.push_back(part.elements);
    return all;
  };
  EXPECT_EQ(elements(stripes[0]), (std::vector<ElementRange>{{5120, 8192}, {11264, 14336}, {19456, 22528}}));
  EXPECT_EQ(elements(stripes[1]), (std::vector<ElementRange>{{2048, 5120}, {8192, 11264}, {16384, 19456}}));
  EXPECT_EQ(elements(stripes[2]), (std::vector<ElementRange>{{0, 2048}, {14336, 16384}}));
}

// A parameter may end within a block.
TEST(Stripes, BeginAtBlocksOfTheGridWhereverElementsEnd) {
  const std::vector<ElementRange> shards = {{0, 2048}, {2048, 4100}};
  const std::vector<Stripe> stripes = stripes_of(shards, 4096);
  ASSERT_EQ(stripes.size(), 2u);
  EXPECT_EQ(stripes[0].parts[1].elements, (ElementRange{3072, 4100}));
  EXPECT_EQ(stripes[1].parts[0].elements, (ElementRange{2048, 3072}));
}

// DeviceRanks needs this: results of twice the width that lie at the end of the unit's memory, or in their
// place if overwriting() lets them, take the place of no element that is in a later stripe.
TEST(Stripes, LetWiderResultsTakeThePlaceOfWhatHasLeft) {
  std::mt19937 random(2);
  for (int i = 0; i < 200; ++i) {
    const std::vector<ElementRange> shards = some_shards(random);
    const std::size_t end = shards.back().end;
    const std::vector<Stripe> stripes = stripes_of(shards, (shards.size() + random() % 20) * kGridBlock);
    const std::vector<std::size_t> stripe = stripes_by_block(stripes, end);
    for (const ElementRange& own : shards) {
      const ElementRange shifted = overwriting(stripes, own, 2);
      EXPECT_EQ(shifted.end, own.end);
      EXPECT_TRUE(2 * own.begin < end || shifted.size() == 0);
      for (std::size_t at = own.begin; at < own.end; at += kGridBlock)
        for (const std::size_t second : {0, 1}) {
          const std::size_t shift = at < shifted.begin ? 0 : end - own.end;
          const std::size_t block = 2 * (at + shift) / kGridBlock + second;
          if (block < stripe.size()) {
            EXPECT_LE(stripe[block], stripe[at / kGridBlock]);
          }
        }
    }
  }
}

}  // namespace
}  // namespace sluice::engine::stripes_test
