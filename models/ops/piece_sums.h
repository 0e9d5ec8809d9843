#pragma once
#include <cstddef>
#include <functional>
#include <string>

#include "core/dtype.h"
#include "models/graph/context.h"
#include "models/graph/cut.h"

namespace sluice::models {

// Adds the contributions of the pieces of a cut dimension to an f32 array, pairwise over all pieces.
class PieceSums {
 public:
  PieceSums(const TensorCut& cut, std::size_t elements);
  PieceSums(const SequenceCut& cut, std::size_t elements);

  std::size_t bytes() const;  // of its buffers
  // Calls compute for each of this rank's pieces, and adds the results, and those of other ranks. Returns the
  // sum, which is in `buffers`. `name` is for errors; `beside` is called while the other ranks' messages are
  // in flight.
  using Compute = std::function<void(std::size_t piece, Array into)>;
  Array add(const OpContext& context, void* buffers, const std::string& name, const Compute& compute,
            const std::function<void()>& beside = {}) const;

 private:
  using Axis = AxisRanks* LayerRanks::*;
  PieceSums(Axis others, std::size_t own_pieces, std::size_t elements);
  std::size_t buffer_elements() const;

  Axis others_;                                   // null: one rank has all pieces
  std::size_t own_pieces_, elements_, most_ = 1;  // the number of buffers
};

}  // namespace sluice::models
