#include "engine/layout/shards.h"

#include "engine/layout/kind.h"
#include "testing.h"

namespace sluice::engine::shards_test {

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

}  // namespace sluice::engine::shards_test
