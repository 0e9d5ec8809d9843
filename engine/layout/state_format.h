#pragma once
#include <cstddef>
#include <vector>

#include "core/dtype.h"
#include "engine/layout/layout.h"
#include "engine/layout/shards.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// The layout of what is kept beside the parameters of trainable units: the master, where the parameters' type
// is narrower than f32 and the optimizer keeps one, then the optimizer's arrays. Each array has the elements
// of the parameters that have it. Chunks follow one another as Shards cuts them. Within a chunk the arrays
// follow one another, and scales follow their codes. See docs/formats/swap.md. Thread rule: it never changes,
// and any thread may read it. `layout` outlives it.
class StateFormat {
 public:
  StateFormat(const Layout& layout, const optim::Optimizer& optimizer, std::size_t chunk_elements,
              const Shards::Ranks& ranks = {1, 0, 1});

  bool has_master(UnitId unit) const;
  // The index of the optimizer's first array: 1 where any unit has masters, which are then array 0; else 0.
  std::size_t masters() const { return masters_; }
  std::size_t arrays() const { return arrays_.size(); }
  const optim::StateArray& array(std::size_t index) const { return arrays_[index]; }
  bool has(std::size_t array, ParameterId parameter) const { return has_[array][parameter]; }

  const Shards& shards() const { return shards_; }
  // In bytes; 0 for a frozen unit. All chunks of a unit but its last take the same number, whole blocks.
  std::size_t chunk_bytes(UnitId unit, std::size_t chunk) const;
  // The bytes of the chunks from `first` to `end` - 1.
  std::size_t chunk_bytes(UnitId unit, std::size_t first, std::size_t end) const {
    return std::min(chunk_offset(unit, end), bytes(unit)) - chunk_offset(unit, first);
  }
  std::size_t chunk_offset(UnitId unit, std::size_t chunk) const { return chunk * units_[unit].stride; }
  std::size_t bytes(UnitId unit) const { return units_[unit].bytes; }
  // The block size of the unit's record.
  std::size_t block_bytes(UnitId unit) const { return units_[unit].block; }
  // Over all ranks, since rank 0 saves the state of the others.
  std::size_t most_chunk_bytes() const { return most_chunk_bytes_; }
  double element_bytes(ParameterId parameter) const;  // of a parameter that is trained
  // The bytes per element that an update reads and writes, with a gradient of the parameter's type, in so
  // many rounds and the application.
  double update_bytes(ParameterId parameter, int rounds) const;

  // The number of elements of the array among the first `first` elements of a chunk, which is the index of
  // the next one in the array.
  std::size_t position(UnitId unit, std::size_t chunk, std::size_t array, std::size_t first) const;
  // The part of an array from an element of the chunk on. REQUIRES: the parameter of that element has the
  // array, and `first` is a multiple of kScaleBlock where the array has codes.
  optim::StatePart part(std::byte* data, UnitId unit, std::size_t chunk, std::size_t array,
                        std::size_t first = 0) const;

 private:
  struct RecordShape {  // in bytes; stride: from one chunk to the next
    std::size_t stride = 0, block = 0, bytes = 0;
  };
  std::size_t array_bytes(UnitId unit, std::size_t chunk, std::size_t array) const;
  std::size_t filled_bytes(UnitId unit, std::size_t chunk) const;
  RecordShape shape_of(UnitId unit) const;

  const Layout& layout_;
  Shards shards_;
  std::vector<optim::StateArray> arrays_;
  std::size_t masters_ = 0;
  std::vector<std::vector<bool>> has_;  // whether an array has a parameter, by array and parameter
  std::vector<bool> everywhere_;        // whether an array has all parameters
  std::vector<RecordShape> units_;
  std::size_t most_chunk_bytes_ = 0;
};

}  // namespace sluice::engine
