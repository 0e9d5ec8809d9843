#include "engine/layout/shards.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/error.h"
#include "engine/layout/kind.h"

namespace sluice::engine {
namespace shards_test {

std::unique_ptr<optim::Optimizer> made(const char* name) { return optim::make_optimizer({.name = name}); }

Layout some_units() {
  UnitSpec span = {"span.0", {{"table", {1500, 1024}}}};
  span.parameters[0].span_elements = kSpanGrain;
  UnitSpec rest = {"span.1", {{"table", {1500, 1024}}}};
  rest.parameters[0].span_first = kSpanGrain;
  rest.parameters[0].span_elements = 1500 * 1024 - kSpanGrain;
  return Layout({{"small", {{"a", {10}}}},
                 {"block", {{"b", {700, 1000}}, {"c", {1000}}, {"d", {3, 96, 512}}, {"e", {50257, 3}}}},
                 span,
                 rest});
}

constexpr std::size_t kChunk = 100 * 1024;

TEST(Shards, AreSlicesThatMakeUpTheUnit) {
  const Layout layout = some_units();
  for (const char* name : {"adamw", "adafactor", "muon"})
    for (const int world : {1, 2, 3, 7, 64}) {
      const auto optimizer = made(name);
      const Shards shards(layout, *optimizer, kChunk, {world, 0, world});
      for (UnitId unit = 0; unit < layout.units().size(); ++unit) {
        std::size_t end = 0;
        for (int rank = 0; rank < world; ++rank) {
          const ElementRange shard = shards.shard(unit, rank);
          EXPECT_EQ(shard.begin, end);
          EXPECT_GE(shard.end, shard.begin);
          end = shard.end;
        }
        EXPECT_EQ(end, layout.unit_elements(unit)) << name << ", " << world << " ranks";
      }
    }
}

TEST(Shards, OfAnElementwiseOptimizerAreOfNearlyOneSize) {
  const Layout layout({{"block", {{"a", {700, 1000}}, {"b", {1000}}, {"c", {300, 1000}}}}});
  const auto optimizer = made("adamw");
  for (const int world : {2, 3, 7}) {
    const Shards shards(layout, *optimizer, kChunk, {world, 0, world});
    std::size_t least = SIZE_MAX, most = 0;
    for (int rank = 0; rank < world; ++rank) {
      least = std::min(least, shards.shard(0, rank).size());
      most = std::max(most, shards.shard(0, rank).size());
    }
    EXPECT_LE(most - least, 2 * kParameterAlignment) << world;
  }
}

TEST(Shards, CutParametersOnlyWhereTheOptimizerAllowsIt) {
  const Layout layout = some_units();
  const auto optimizer = made("adafactor");
  const Shards shards(layout, *optimizer, kChunk, {7, 0, 7});
  std::size_t cut = 0;
  for (ParameterId p = 0; p < layout.parameters(); ++p) {
    const Layout::Location& location = layout.location(p);
    for (int rank = 1; rank < 7; ++rank) {
      const std::size_t begin = shards.shard(location.unit, rank).begin;
      if (begin <= location.offset || begin >= location.offset + location.elements) continue;
      const std::size_t at = layout.spec(p).span_first + begin - location.offset;
      EXPECT_EQ(optimizer->last_cut(kind_of(layout.spec(p)), at), at) << layout.spec(p).name;
      ++cut;
    }
  }
  EXPECT_GT(cut, 5u);
}

// Each rank's slices, and those of one process that has all shards, name each element once.
TEST(Shards, SlicesOfAllChunksHaveEachElementOnce) {
  const Layout layout = some_units();
  for (const char* name : {"adamw", "adafactor"})
    for (const bool together : {true, false}) {
      const auto optimizer = made(name);
      std::vector<std::vector<int>> seen;
      for (ParameterId p = 0; p < layout.parameters(); ++p) seen.emplace_back(layout.location(p).elements);
      for (int rank = 0; rank < (together ? 1 : 3); ++rank) {
        const Shards shards(layout, *optimizer, kChunk,
                            together ? Shards::Ranks{3, 0, 3} : Shards::Ranks{3, rank, rank + 1});
        for (UnitId unit = 0; unit < layout.units().size(); ++unit)
          for (std::size_t chunk = 0; chunk < shards.chunks(unit); ++chunk) {
            const ElementRange range = shards.chunk(unit, chunk);
            EXPECT_LE(range.size(), kChunk);
            for (const Slice& slice : shards.slices(unit, chunk)) {
              EXPECT_EQ(range.begin + slice.in_chunk, layout.location(slice.parameter).offset + slice.first);
              for (std::size_t i = 0; i < slice.count; ++i) ++seen[slice.parameter][slice.first + i];
            }
          }
      }
      for (const std::vector<int>& times : seen)
        EXPECT_EQ(std::ranges::count(times, 1), static_cast<std::ptrdiff_t>(times.size())) << name;
    }
}

TEST(Shards, ChunksAreFoundByTheirElements) {
  const Layout layout = some_units();
  const auto optimizer = made("adamw");
  const Shards shards(layout, *optimizer, kChunk, {3, 0, 3});
  for (const ElementRange wanted :
       {ElementRange{0, 1}, {200'000, 200'001}, {150'000, 600'000}, {700'000, 702'000}}) {
    const ElementRange found = shards.chunks_with(1, wanted);
    for (std::size_t chunk = 0; chunk < shards.chunks(1); ++chunk) {
      const ElementRange range = shards.chunk(1, chunk);
      const bool meets = range.begin < wanted.end && wanted.begin < range.end;
      EXPECT_EQ(found.begin <= chunk && chunk < found.end, meets) << wanted.begin << ", chunk " << chunk;
    }
  }
}

TEST(Shards, OfOtherRanksAreNotHere) {
  const Layout layout = some_units();
  const auto optimizer = made("adamw");
  const Shards shards(layout, *optimizer, kChunk, {4, 1, 2});
  EXPECT_THROW((void)shards.shard(0, 0), Error);
  EXPECT_EQ(shards.chunks_with(1, {0, 1}).size(), 0u) << "the first element is of rank 0";
  EXPECT_THROW((void)shards.chunk(1, 1000), Error);
  EXPECT_THROW(Shards(layout, *optimizer, kChunk, {4, 3, 5}), Error);
}

}  // namespace shards_test
}  // namespace sluice::engine
