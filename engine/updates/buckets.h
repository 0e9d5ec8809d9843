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
  std::size_t first_chunk = 0, end_chunk = 0;  // chunks with elements of them; may be none
  int rounds = 0;                              // how many rounds come before the application
  std::size_t scratch_bytes = 0;               // the memory in which their rounds hand on results
  std::size_t workspace_bytes = 0;             // the memory in which one combination works
};

// The part of a joint update of several units that is done with one of them: each chunk of its only parameter
// is visited once. All units have their pass of one round, in ascending order, before the first has its pass
// of the next round.
struct Pass {
  int round = 0;                     // Optimizer::rounds() stands for the application
  bool first = false, last = false;  // whether it is the first, or the last, pass of its round
  bool operator==(const Pass&) const = default;
};

// The units that are updated jointly with this one. Where the optimizer has rounds for the parameter that a
// unit has a span of, these are all units with a span of it, since no span may change before the sums over
// the whole parameter are known. Otherwise it is the unit alone.
UnitRange updated_together(const Layout& layout, const optim::Optimizer& optimizer, UnitId unit);
// The passes of a joint update, in order; none where there is one unit.
std::vector<std::pair<UnitId, Pass>> passes_of(const optim::Optimizer& optimizer, UnitRange units);

// A bucket has one parameter, or as many as need no more scratch memory together. Chunks at its ends are read
// for two buckets, which costs little at this size.
inline constexpr std::size_t kBucketBytes = std::size_t{64} << 20;

// The buckets of a trainable unit, which together have all of its parameters. A frozen unit has none.
std::vector<Bucket> buckets_of(const Layout& layout, const optim::Optimizer& optimizer, const Shards& shards,
                               UnitId unit);

std::size_t scratch_bytes(const optim::Optimizer& optimizer, const optim::Kind& kind);  // for one parameter

// The memory for rounds: that of the bucket which needs most.
struct RoundsNeed {
  std::size_t bytes = 0;
  std::size_t scratch_bytes = 0;  // how many of them the rounds hand results on in
  ParameterId largest = 0;        // the parameter of that bucket which needs most
};
RoundsNeed rounds_need(const Layout& layout, const optim::Optimizer& optimizer);

}  // namespace sluice::engine
