#pragma once
#include <utility>
#include <vector>

#include "engine/layout/layout.h"
#include "engine/layout/shards.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// Consecutive parameters of a unit that an update takes through the optimizer's rounds together.
struct Bucket {
  ParameterId first = 0, end = 0;
  std::size_t first_chunk = 0, end_chunk = 0;  // chunks that contain elements of them; may be empty
  int rounds = 0;                              // how many rounds precede the application
  std::size_t scratch_bytes = 0;               // memory by which the rounds pass on results
  std::size_t workspace_bytes = 0;             // memory for one combination
};

// A part of a joint update of several units: one visit of each chunk of one unit's only parameter. All units
// have their pass of one round, in ascending order, before the first unit has its pass of the next round.
struct Pass {
  int round = 0;                     // Optimizer::rounds() stands for the application
  bool first = false, last = false;  // of its round
  bool operator==(const Pass&) const = default;
};

// The units that are updated jointly with this one. Where the optimizer has rounds for the parameter of which
// the unit has a span, these are all units with a span of it, since no span may change before the sums over
// the whole parameter are known. Otherwise it is the unit alone.
UnitRange updated_together(const Layout& layout, const optim::Optimizer& optimizer, UnitId unit);
// The passes of a joint update, in order; none where there is one unit.
std::vector<std::pair<UnitId, Pass>> passes_of(const optim::Optimizer& optimizer, UnitRange units);

// A bucket has one parameter, or as many as need at most this much scratch memory together. Chunks at its
// ends are read for two buckets, which costs little at this size.
inline constexpr std::size_t kBucketBytes = std::size_t{64} << 20;

// The buckets of a trainable unit, which together have all of its parameters. A frozen unit has none.
std::vector<Bucket> buckets_of(const Layout& layout, const optim::Optimizer& optimizer, const Shards& shards,
                               UnitId unit);

std::size_t scratch_bytes(const optim::Optimizer& optimizer, const optim::Kind& kind);  // for one parameter

// The memory for rounds: that of the bucket that needs most.
struct RoundsNeed {
  std::size_t bytes = 0;
  std::size_t scratch_bytes = 0;  // the part of them by which rounds pass on results
  ParameterId largest = 0;        // the parameter of that bucket which needs most
};
RoundsNeed rounds_need(const Layout& layout, const optim::Optimizer& optimizer);

}  // namespace sluice::engine
