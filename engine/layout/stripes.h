#pragma once
#include <cstddef>
#include <span>
#include <vector>

#include "engine/layout/shards.h"

namespace sluice::engine {

// Elements of a unit that are processed together: some of each rank's shard, so that all ranks have the same
// work at the same time.
struct Stripe {
  struct Part {
    ElementRange elements;  // of the unit
    std::size_t at = 0;     // where they begin in memory that has only the stripe
  };
  std::vector<Part> parts;
};

// Cuts a unit's shards into stripes of at most `most` elements, which go from the end of each shard to its
// beginning, with equally many elements of each shard that has as many left. Parts begin at blocks of the
// grid (kernels::kGridBlock). REQUIRES: shards begin there, too, and `most` has a block for each of them.
std::vector<Stripe> stripes_of(std::span<const ElementRange> shards, std::size_t most);

// A rank's share of `count` elements, which begins at a block of the grid: as many as each other rank's, or
// fewer at the end; may be empty.
ElementRange share_of(std::size_t count, std::size_t rank, std::size_t ranks);

// Each stripe's results for `own`, one of the shards, are `times` as wide as its elements, and take the
// unit's memory. Returns the elements from the first one whose result would overwrite an element of a later
// stripe to the shard's end; may be empty.
ElementRange overwriting(std::span<const Stripe> stripes, ElementRange own, std::size_t times);

}  // namespace sluice::engine
