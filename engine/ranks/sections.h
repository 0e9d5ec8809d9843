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

// What the norm of all gradients is made of.
struct GradientSquares {
  struct Term {
    std::size_t index;  // of the parameter in the model: Layout::logical_index()
    double squares;     // the sum of those of its gradient
  };
  struct Parameter {
    std::size_t index;
    std::string name;
  };
  std::vector<Term> terms;              // by index
  std::optional<Parameter> not_finite;  // the first one whose gradient is not finite

  double norm() const;  // adds the terms in their order
};

// The sections of a pipeline that have the units of one model, as the engine of one of them sees them. Calls
// are collective over the sections. Thread rule: one thread.
class Sections {
 public:
  explicit Sections(comm::Communicator& sections) : sections_(sections) {}

  // What all sections have. meanwhile: as Communicator::exchange().
  GradientSquares gather(const GradientSquares& own, const std::function<void()>& meanwhile);
  // Of a unit that the first and the last section have, which each write one use of its gradient: gives the
  // other one the own use, and takes its use from it. Arrays of one size at both ends.
  void swap_uses(std::span<const float> own, std::span<float> others, TransferGroup& group);
  comm::Communicator& communicator() const { return sections_; }

 private:
  comm::Communicator& sections_;
};

}  // namespace sluice::engine
