#pragma once
#include <cstddef>
#include <functional>
#include <string>

#include "core/dtype.h"
#include "models/graph/context.h"
#include "models/graph/cut.h"

namespace sluice::models {

// Adds what the pieces of a cut dimension contribute to an array of f32, pairwise over all pieces.
class PieceSums {
 public:
  PieceSums(const TensorCut& cut, std::size_t elements);

  std::size_t bytes() const;  // of its buffers
  // Computes each own piece's part into an array, adds them, and those of the other ranks. Returns the sum,
  // which is in the buffers. name: what the other ranks are asked for. beside: called while they send theirs.
  using Compute = std::function<void(std::size_t piece, Array into)>;
  Array add(const OpContext& context, void* buffers, const std::string& name, const Compute& compute,
            const std::function<void()>& beside = {}) const;

 private:
  std::size_t buffer_elements() const;

  TensorCut cut_;
  std::size_t elements_, most_ = 1;  // buffers
};

}  // namespace sluice::models
