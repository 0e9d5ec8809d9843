#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/matrix.h"
#include "models/graph/graph.h"
#include "models/graph/recompute.h"

// A compiled graph: which op runs when, and where every value and gradient lies.
namespace sluice::models {

// The memory areas of a program. kBorder has the gradient that a unit passes to the next, in place. Where the
// gradients of weights have a pass of their own, kKeptForWeights has values of forward that are kept for that
// pass, too, and kLeftForWeights has values that backward leaves for it.
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
  std::size_t op = 0;                     // unused by kCopy and kAdd
  std::vector<Location> inputs, outputs;  // kNone: the step does not use it
  std::vector<Location> input_gradients, output_gradients;
  std::vector<bool> adds;  // by input: whether its gradient is accumulated
  Location scratch;
  // kCopy, kAdd: the gradient of `value` is set to, or increased by, the array at `from`.
  ValueId value = 0;
  Location from, to;
};

// A range of the workspace and the steps (inclusive) during which its contents are live.
struct Buffer {
  std::size_t offset = 0, bytes = 0;
  std::size_t first = 0, last = 0;
};

struct Program {
  std::vector<Step> steps;
  std::vector<Buffer> buffers;
  std::size_t workspace_bytes = 0;
};

// Assigns offsets so that buffers with overlapping lifetimes share no byte: the largest first, each at the
// lowest free offset. Returns the bytes needed in all. Pure and deterministic.
std::size_t place_buffers(std::vector<Buffer>& buffers);

struct UnitProgram {
  Program forward;
  Program backward;  // recomputes values that are not kept, as late as possible, and takes gradients
  Program weights;   // has no steps where backward is not split
  std::size_t kept_bytes = 0, kept_for_weights_bytes = 0, left_for_weights_bytes = 0;
  std::size_t workspace_bytes() const {
    return std::max({forward.workspace_bytes, backward.workspace_bytes, weights.workspace_bytes});
  }
};

// splits_backward: for ops that can split, backward computes only the gradients of inputs, and weights those
// of parameters.
UnitProgram compile(const Graph& graph, const Choice& choice, kernels::ProductSurvey& products,
                    bool splits_backward = false);

}  // namespace sluice::models
