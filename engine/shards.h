#pragma once
#include <cstddef>
#include <vector>

#include "engine/layout.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// Elements that follow each other: begin ... end - 1.
struct ElementRange {
  std::size_t begin = 0, end = 0;
  std::size_t size() const { return end - begin; }
  bool operator==(const ElementRange&) const = default;
};

// The part of a parameter that lies in a chunk; padding belongs to none.
struct Slice {
  ParameterId parameter = 0;
  std::size_t first = 0;     // element of the parameter, or of its span in this unit
  std::size_t in_chunk = 0;  // element of the chunk
  std::size_t count = 0;
};

// How units are cut: a unit into shards, one a rank; a shard into chunks, which are streamed one by one; a
// chunk into slices, one of each parameter that has elements in it. All other code asks here. A shard ends
// where the optimizer lets a parameter be cut (optim::Rounds::last_cut()), so shards of a unit may be
// unequal, and empty. Thread rule: it does not change, and is safe to read from any thread. layout outlives
// it.
class Shards {
 public:
  // Of `world` ranks; here are the shards of those from `first` to `end` - 1.
  struct Ranks {
    int world = 1, first = 0, end = 1;
  };
  Shards(const Layout& layout, const optim::Optimizer& optimizer, std::size_t chunk_elements);
  Shards(const Layout& layout, const optim::Optimizer& optimizer, std::size_t chunk_elements, Ranks ranks);

  ElementRange shard(UnitId unit, int rank) const;  // of the unit's elements. REQUIRES: the shard is here

  // The chunks of all shards of the unit that are here, in ascending order. All chunks of a shard but its
  // last have chunk_elements().
  std::size_t chunk_elements() const { return chunk_elements_; }
  std::size_t chunks(UnitId unit) const;
  ElementRange chunk(UnitId unit, std::size_t chunk) const;  // of the unit's elements
  // The chunks that have elements of a range of the unit's: begin ... end - 1; may be none.
  ElementRange chunks_with(UnitId unit, ElementRange elements) const;

  // In the order of the unit's parameters.
  std::vector<Slice> slices(UnitId unit, std::size_t chunk) const;
  Slice slice(ParameterId parameter, std::size_t chunk) const;  // count 0: it has no elements there

 private:
  std::size_t& border(UnitId unit, int rank) {
    return borders_[unit * (held_ + 1) + static_cast<std::size_t>(rank)];
  }
  ElementRange held(UnitId unit, std::size_t index) const {  // the index-th shard that is here
    const std::size_t* const border = &borders_[unit * (held_ + 1) + index];
    return {border[0], border[1]};
  }

  const Layout& layout_;
  std::size_t chunk_elements_;
  Ranks ranks_;
  std::size_t held_;  // shards of a unit that are here
  std::vector<std::size_t>
      borders_;  // of each unit: where its shards that are here begin, and where the last ends
};

}  // namespace sluice::engine
