#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/matrix.h"
#include "models/graph/graph.h"
#include "models/graph/recompute.h"

// A graph made ready to run: which op runs when, and where every value and gradient lies.
namespace sluice::models {

// The memories that a program works in. kBorder has the gradient that a unit hands to the next, in place.
// Where weights have a pass of their own, kKeptForWeights has what is kept from forward for it, too, and
// kLeftForWeights what backward leaves for it.
enum class Area : std::uint8_t {
  kNone,
  kInput,
  kOutput,
  kKept,
  kKeptForWeights,
  kLeftForWeights,
  kWorkspace,
  kBorder,
};
inline constexpr std::size_t kAreas = 8;

struct Location {
  Area area = Area::kNone;
  std::size_t offset = 0;  // bytes
  bool operator==(const Location&) const = default;
};

struct Step {
  enum class Kind : std::uint8_t { kForward, kBackward, kBackwardInputs, kBackwardWeights, kCopy, kAdd };
  Kind kind = Kind::kForward;
  std::size_t op = 0;                     // not for kCopy and kAdd
  std::vector<Location> inputs, outputs;  // kNone: not needed by this step
  std::vector<Location> input_gradients, output_gradients;
  std::vector<bool> adds;  // whether an input's gradient is added to what is there
  Location scratch;
  // kCopy, kAdd: the gradient of `value` is set to, or increased by, what lies at `from`.
  ValueId value = 0;
  Location from, to;
};

// A range of the workspace and the steps (inclusive) in which its content matters.
struct Buffer {
  std::size_t offset = 0, bytes = 0;
  std::size_t first = 0, last = 0;
};

struct Program {
  std::vector<Step> steps;
  std::vector<Buffer> buffers;
  std::size_t workspace_bytes = 0;
};

// Gives buffers offsets at which those whose steps overlap share no byte: the largest first, each the lowest
// that is free. Returns the bytes that all of them need. Pure and deterministic.
std::size_t place_buffers(std::vector<Buffer>& buffers);

struct UnitProgram {
  Program forward;
  Program backward;  // recomputes what is not kept as late as it can, then takes gradients in reverse
  Program weights;   // has no steps where backward is not split
  std::size_t kept_bytes = 0, kept_for_weights_bytes = 0, left_for_weights_bytes = 0;
  std::size_t workspace_bytes() const {
    return std::max({forward.workspace_bytes, backward.workspace_bytes, weights.workspace_bytes});
  }
};

// splits_backward: where ops can, backward makes the gradients of inputs alone, and weights those of weights.
UnitProgram compile(const Graph& graph, const Choice& choice, kernels::ProductSurvey& products,
                    bool splits_backward = false);

}  // namespace sluice::models
