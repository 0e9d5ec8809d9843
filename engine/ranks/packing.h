#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include "comm/given.h"

namespace sluice::engine {

// Which elements of an array are sent where the others are known to be 0: pieces of it, which are moved
// together to its front, and back again. Thread rule: it never changes, and any thread may use it.
class Packing {
 public:
  struct Piece {
    std::size_t begin = 0, end = 0;
  };
  // The pieces ascend, and do not overlap.
  explicit Packing(const std::vector<Piece>& pieces);

  std::size_t size() const { return moved_.empty() ? 0 : moved_.back().to + moved_.back().size; }
  // Where the first element of a piece that is not before this one lies once all are packed.
  std::size_t position(std::size_t element) const;
  // What ranks give of a packed array, by what they give of the array. REQUIRES: they give no strided runs.
  std::shared_ptr<const comm::Given> packed(const comm::Given& given) const;
  void pack(float* array) const;
  // Moves the elements begin ... end - 1 of the array to where they were, and sets those of no piece to 0.
  // The rest of the array is unspecified then.
  void unpack(float* array, std::size_t begin, std::size_t end) const;

 private:
  struct Moved {
    std::size_t from, to, size;  // elements
  };
  std::vector<Moved> moved_;
};

}  // namespace sluice::engine
