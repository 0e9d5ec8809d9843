#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "allocator/memory.h"
#include "core/threads.h"
#include "core/trace.h"
#include "engine/layout.h"
#include "engine/step/batches.h"
#include "engine/store/backing.h"
#include "engine/store/state_format.h"
#include "engine/store/whole_store.h"
#include "optim/optimizer.h"

namespace sluice::engine {

struct ParameterUpdate {
  std::uint64_t step = 0;      // of this parameter's updates, this one included; 0: it is left as it is
  double gradient_factor = 1;  // beside the one of its group
};

// One unit's update, as it was decided: what to apply, and where its parts are.
struct Update {
  UnitId unit = 0;
  std::optional<Pass> pass = {};  // of an update that units have together; nothing: all of the unit's own
  std::vector<optim::Hyperparameters> groups;
  std::vector<ParameterUpdate> parameter_updates;  // by parameter of the unit
  // The unit's home, which stays there until the update is applied; null data: this pass does not look at it.
  Array parameters;
  ConstArray gradient;                  // in memory, or null data:
  Backing* gradient_backing = nullptr;  // streamed from there
  Dtype gradient_type = Dtype::kF32;
};

// What is computed at once: a batch's share of one chunk, in one round or in the application.
struct ChunkWork {
  const Update& update;
  const Batch& batch;
  int round = 0;                     // batch.rounds: the application
  std::optional<std::size_t> chunk;  // nothing: the batch has no elements here, and the round ends
  std::byte* state = nullptr;        // of the chunk, as StateFormat has it; null where the round reads none
  ConstArray gradient = {};          // of the chunk
  bool begins_round = false, ends_round = false;  // the latter of rounds: the combination follows
  bool applies() const { return round == batch.rounds; }
};

// Adds what the parts of parameters sum up, where other ranks have parts, too (optim::Rounds::sums()). Every
// rank calls it for the same parameters in the same order.
class PartsOfOthers {
 public:
  virtual ~PartsOfOthers() = default;
  virtual void add(
      const optim::PartSums& sums) = 0;  // waits; afterwards each value is the sum over all parts
};

// Computes updates where their parts are in memory: which processor does it, and on whose thread, is an
// executor's own. Works are done in the order in which they are given. Thread rule: one thread at a time, but
// for what `done` says.
class UpdateExecutor {
 public:
  virtual ~UpdateExecutor() = default;
  // Takes the memory of rounds. Before the first work.
  virtual void start(allocator::Ledger& ledger) = 0;
  // done: called once when the work is done, with its error or null, from within begin() or later from a
  // thread of the executor's. Until then all that the work refers to stays, and nobody else uses it.
  virtual void begin(const ChunkWork& work, offload::Done done) = 0;
  // With which the one who calls `done`, or is called, may go on.
  virtual Threads& threads() = 0;
  virtual double seconds() const = 0;  // of arithmetic so far
};

struct ExecutorTools {
  Threads& threads;
  kernels::F32Products* products = nullptr;  // REQUIRES: not null where the optimizer has products
  Trace* trace = nullptr;
  PartsOfOthers* others = nullptr;  // null: all parts of all parameters are here
};

// The CPU's, which takes turns with whoever calls it: begin() computes on the tools' threads and calls `done`
// before it returns. All that is handed in outlives it.
std::unique_ptr<UpdateExecutor> make_turn_executor(const Layout& layout, const optim::Optimizer& optimizer,
                                                   const StateFormat& format, const WholeStore& wholes,
                                                   const ExecutorTools& tools);

}  // namespace sluice::engine
