#pragma once
#include <utility>
#include <vector>

#include "engine/layout.h"
#include "engine/shards.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// Parameters of a unit, one after another, that an update takes through its rounds together.
struct Batch {
  ParameterId first = 0, end = 0;
  std::size_t first_chunk = 0, end_chunk = 0;  // of the unit, that have elements of them; may be none
  int rounds = 0;                              // before the application
  std::size_t scratch_bytes = 0;               // what their rounds hand on
  std::size_t workspace_bytes = 0;             // of one combination
};

// Of an update that several units have together, what is done with one of them: the chunks of its only
// parameter, once. The passes of all units in a round, in ascending order, come before those of the next.
struct Pass {
  int round = 0;                     // Optimizer::rounds(): the application
  bool first = false, last = false;  // of the round
  bool operator==(const Pass&) const = default;
};

// Those that are updated together with the unit: its siblings, where the optimizer has rounds for their
// parameter, since no part may change before the sums over all of it are there; else it alone.
UnitRange updated_together(const Layout& layout, const optim::Optimizer& optimizer, UnitId unit);
// Their passes in order, each with its unit; none for one unit.
std::vector<std::pair<UnitId, Pass>> passes_of(const optim::Optimizer& optimizer, UnitRange units);

// At least one parameter, and otherwise as many as keep scratch within this: what each round reads again at a
// batch's ends is little then.
inline constexpr std::size_t kBatchBytes = std::size_t{64} << 20;

// All parameters of a trainable unit are in one of its batches; a frozen one has none.
std::vector<Batch> batches_of(const Layout& layout, const optim::Optimizer& optimizer, const Shards& shards,
                              UnitId unit);

std::size_t scratch_bytes(const optim::Optimizer& optimizer, const optim::Kind& kind);  // of a parameter

// For the rounds of the batch that needs most.
struct RoundsNeed {
  std::size_t bytes = 0;
  std::size_t scratch_bytes = 0;  // of these
  ParameterId largest = 0;        // of its parameters
};
RoundsNeed rounds_need(const Layout& layout, const optim::Optimizer& optimizer);

}  // namespace sluice::engine
