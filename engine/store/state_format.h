#pragma once
#include <cstddef>
#include <vector>

#include "core/dtype.h"
#include "engine/layout.h"
#include "engine/shards.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// What is kept for the elements of trainable units beside their parameters, and where it lies: the master,
// where the parameters' type is narrower and the optimizer keeps one, then the optimizer's arrays as it
// describes them, each with the elements of those parameters that have it. Chunks follow each other, as
// Shards cuts them; the arrays of a chunk lie side by side, codes followed by their scales. See
// docs/formats/swap.md. Thread rule: it does not change. `layout` outlives it.
class StateFormat {
 public:
  StateFormat(const Layout& layout, const optim::Optimizer& optimizer, std::size_t chunk_elements,
              Shards::Ranks ranks = {1, 0, 1});

  // Whether the unit's values are held in f32 beside its parameters.
  bool has_master(UnitId unit) const;
  // 0, or, where any unit has masters, which are array 0 then, 1: the first of the optimizer's arrays.
  std::size_t masters() const { return masters_; }
  std::size_t arrays() const { return arrays_.size(); }
  const optim::StateArray& array(std::size_t index) const { return arrays_[index]; }
  bool has(std::size_t array, ParameterId parameter) const { return has_[array][parameter]; }

  const Shards& shards() const { return shards_; }
  // Bytes. Of a frozen unit 0. Every chunk but a unit's last is as long as the others, and a whole number of
  // blocks.
  std::size_t chunk_bytes(UnitId unit, std::size_t chunk) const;
  std::size_t chunk_offset(UnitId unit, std::size_t chunk) const { return chunk * units_[unit].stride; }
  std::size_t bytes(UnitId unit) const { return units_[unit].bytes; }
  std::size_t block_bytes(UnitId unit) const { return units_[unit].block; }  // of the record
  std::size_t most_chunk_bytes() const { return most_chunk_bytes_; }
  double element_bytes(ParameterId parameter) const;  // of a trainable unit

  // An array's elements among [0, first) of a chunk: where those from `first` on begin.
  std::size_t position(UnitId unit, std::size_t chunk, std::size_t array, std::size_t first) const;
  // An array's part from an element of a chunk on, which is of a parameter that has it. first: where the
  // array has codes, a multiple of kScaleBlock.
  optim::StatePart part(std::byte* data, UnitId unit, std::size_t chunk, std::size_t array,
                        std::size_t first = 0) const;

 private:
  struct Unit {
    std::size_t stride = 0, block = 0, bytes = 0;
  };
  std::size_t array_bytes(UnitId unit, std::size_t chunk, std::size_t array) const;
  std::size_t filled_bytes(UnitId unit, std::size_t chunk) const;
  Unit place(UnitId unit) const;

  const Layout& layout_;
  Shards shards_;
  std::vector<optim::StateArray> arrays_;
  std::size_t masters_ = 0;
  std::vector<std::vector<bool>> has_;  // by array and parameter
  std::vector<bool> everywhere_;        // by array
  std::vector<Unit> units_;
  std::size_t most_chunk_bytes_ = 0;
};

}  // namespace sluice::engine
