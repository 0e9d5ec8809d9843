#pragma once
#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "core/transfers.h"

namespace sluice::engine {

// The terms of the norm of all gradients.
struct GradientSquares {
  struct Term {
    std::size_t index;  // of the parameter in the model: Layout::logical_index()
    double squares;     // of its gradient, summed
  };
  struct Parameter {
    std::size_t index;
    std::string name;
  };
  std::vector<Term> terms;              // by index
  std::optional<Parameter> not_finite;  // the first one whose gradient is not finite

  double norm() const;  // adds the terms in their order
};

// The sections of a pipeline that share the units of one model, as the engine of one of them sees them. Calls
// are collective over the sections. Thread rule: one thread.
class Sections {
 public:
  explicit Sections(comm::Communicator& sections) : sections_(sections) {}

  // Gathers the squares of all sections. meanwhile: as Communicator::exchange().
  GradientSquares gather(const GradientSquares& own, const std::function<void()>& meanwhile);
  // For a unit that the first and the last section have, each of which writes one use of its gradient: sends
  // the own use to the other section, and receives the other one. The arrays have one size at both ends.
  void swap_uses(std::span<const float> own, std::span<float> others, TransferGroup& group);
  comm::Communicator& communicator() const { return sections_; }

 private:
  comm::Communicator& sections_;
};

}  // namespace sluice::engine
