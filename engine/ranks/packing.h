#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include "comm/given.h"

namespace sluice::engine {

// The elements of an array that are sent, where the others are known to be 0: pieces of the array, which are
// packed at its front, and unpacked again. Thread rule: it never changes, and any thread may use it.
class Packing {
 public:
  struct Piece {
    std::size_t begin = 0, end = 0;
  };
  // The pieces ascend, and do not overlap.
  explicit Packing(const std::vector<Piece>& pieces);

  std::size_t size() const { return moved_.empty() ? 0 : moved_.back().to + moved_.back().size; }
  // The packed position of an element; outside of all pieces, that of the next piece.
  std::size_t position(std::size_t element) const;
  // Returns the elements that ranks contribute to a packed array, given those that they contribute to the
  // array. REQUIRES: no strided runs.
  std::shared_ptr<const comm::Given> packed(const comm::Given& given) const;
  void pack(float* array) const;
  // Moves the elements begin ... end - 1 of the array back to their places, and clears those of no piece. The
  // rest of the array is then unspecified.
  void unpack(float* array, std::size_t begin, std::size_t end) const;

 private:
  struct Moved {
    std::size_t from, to, size;  // elements
  };
  std::vector<Moved> moved_;
};

}  // namespace sluice::engine
