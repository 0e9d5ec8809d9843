#pragma once
#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "engine/layout/layout.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// Consecutive elements: begin ... end - 1.
struct ElementRange {
  std::size_t begin = 0, end = 0;
  std::size_t size() const { return end - begin; }
  bool operator==(const ElementRange&) const = default;
};

// The common elements. If there are none, the range is empty and within `b`.
inline ElementRange intersection(ElementRange a, ElementRange b) {
  const std::size_t begin = std::clamp(a.begin, b.begin, b.end);
  return {begin, std::clamp(a.end, begin, b.end)};
}

// A parameter's elements, or those of its span, counted in its unit.
inline ElementRange elements_of(const Layout& layout, ParameterId parameter) {
  const Layout::Location& at = layout.location(parameter);
  return {at.offset, at.offset + at.elements};
}

// The elements of one parameter that lie in a chunk. Padding belongs to no slice.
struct Slice {
  ParameterId parameter = 0;
  std::size_t first = 0;     // the first element, counted in the parameter or in its span in this unit
  std::size_t in_chunk = 0;  // its position in the chunk
  std::size_t count = 0;
};

// Cuts units into shards, one per rank; shards into chunks, which are streamed one by one; and chunks into
// slices, one for each parameter with elements in the chunk. No other code cuts units. A shard ends where the
// optimizer lets a parameter be cut (optim::Rounds::last_cut()), so the shards of a unit may differ in size,
// and may be empty. Thread rule: it never changes, and any thread may read it. `layout` outlives it.
class Shards {
 public:
  // Of the `world` ranks, those from `first` to `end` - 1 have their shards here. cut: by unit; one that is
  // not cut is here as a whole, in one shard. Empty: all are cut.
  struct Ranks {
    int world = 1, first = 0, end = 1;
    std::vector<bool> cut = {};
  };
  static Ranks of(int rank, int world, std::vector<bool> cut) {
    return {world, rank, rank + 1, std::move(cut)};
  }
  Shards(const Layout& layout, const optim::Optimizer& optimizer, std::size_t chunk_elements);
  Shards(const Layout& layout, const optim::Optimizer& optimizer, std::size_t chunk_elements,
         const Ranks& ranks);

  ElementRange shard(UnitId unit, int rank) const;  // the elements of the unit. REQUIRES: the shard is here

  ElementRange here(UnitId unit) const;  // from the first shard that is here to the last one

  // The chunks of all shards of a unit that are here are numbered in ascending order. All chunks of a shard
  // but its last have chunk_elements().
  std::size_t chunk_elements() const { return chunk_elements_; }
  std::size_t chunks(UnitId unit) const;
  ElementRange chunk(UnitId unit, std::size_t chunk) const;  // the elements of the unit
  // The numbers of the chunks that contain some of these elements of the unit; may be empty.
  ElementRange chunks_with(UnitId unit, ElementRange elements) const;

  // The slices of a chunk, in the order of the parameters.
  std::vector<Slice> slices(UnitId unit, std::size_t chunk) const;
  // The slices of any elements of the unit; in_chunk counts from the first of them.
  std::vector<Slice> slices(UnitId unit, ElementRange elements) const;
  // The slice of one parameter; its count is 0 where there is none.
  Slice slice(ParameterId parameter, std::size_t chunk) const;
  Slice slice(ParameterId parameter, ElementRange elements) const;

 private:
  // The index-th shard of the unit that is here.
  ElementRange held(UnitId unit, std::size_t index) const {
    const std::size_t* const border = &borders_[unit * (held_ + 1) + index];
    return {border[0], border[1]};
  }
  const std::size_t* chunks_before(UnitId unit) const { return &chunks_before_[unit * (held_ + 1)]; }

  const Layout& layout_;
  std::size_t chunk_elements_;
  int first_;         // the first rank whose shards are here
  std::size_t held_;  // how many shards of each unit are here
  // By unit: where its shards begin, and where the last one here ends; and the number of chunks before each.
  std::vector<std::size_t> borders_, chunks_before_;
};

}  // namespace sluice::engine
