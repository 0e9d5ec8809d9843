#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "allocator/memory.h"
#include "core/threads.h"
#include "core/trace.h"
#include "engine/layout/layout.h"
#include "engine/layout/state_format.h"
#include "engine/memory/backing.h"
#include "engine/memory/whole_store.h"
#include "engine/updates/buckets.h"
#include "optim/optimizer.h"

namespace sluice::engine {

struct ParameterUpdate {
  std::uint64_t step = 0;      // the number of this update, from 1; 0: the parameter is not updated
  double gradient_factor = 1;  // multiplies the factor of its group
};

// The update of one unit: the settings to apply, and where its parts are.
struct Update {
  UnitId unit = 0;
  std::optional<Pass> pass = {};  // a pass of a joint update; nullopt: all of the unit's own update
  std::vector<optim::Hyperparameters> groups;
  std::vector<ParameterUpdate> parameter_updates;  // by parameter of the unit
  // The unit's home, held until the update is applied. data is null where this pass needs no parameters, or
  // where those that this rank updates are streamed through parameters_backing.
  Array parameters;
  std::size_t first_parameter = 0;  // the unit's element at which they begin
  Backing* parameters_backing = nullptr;
  std::size_t parameters_backing_bytes = 0;
  // Begins with the first element that this rank updates. In memory; where data is null, it is streamed from
  // gradient_backing.
  ConstArray gradient;
  Backing* gradient_backing = nullptr;
  std::size_t gradient_backing_bytes = 0;
  Dtype gradient_type = Dtype::kF32;
  // Whether each backing begins with the unit's first element, rather than this rank's.
  bool whole_parameters = false, whole_gradient = false;
  // Where a GPU writes whether the update must be skipped: see DeviceGradients::check(). Null: the gradient
  // is known to be finite.
  const std::uint32_t* refused = nullptr;
  // Called once, on any thread, when parameters are changed, in memory or in their backing, and the update
  // has no error; null: nobody waits for that. It must not throw.
  std::function<void()> on_changed = {};
  // REQUIRES: the CPU updates, and has waited for the GPU's check.
  bool is_refused() const { return refused != nullptr && *refused != 0; }
};

// The unit of computation: one chunk's part of a bucket, in one round or in the application.
struct ChunkWork {
  const Update& update;
  const Bucket& bucket;
  int round = 0;                     // Bucket::rounds stands for the application
  std::optional<std::size_t> chunk;  // nullopt: the bucket has no elements here
  std::byte* state = nullptr;  // the chunk's state in StateFormat's layout; unspecified bytes where the round
                               // reads none
  ConstArray gradient = {};
  Array parameters = {};                          // data is null where they are not needed
  std::size_t first_parameter = 0;                // the unit's element at which they begin
  bool begins_round = false, ends_round = false;  // at the end of a round its results are combined
  // The next chunk's work follows at once, with its parts beside this one's. So the executor may defer this
  // work and compute both together, even after it has called `done`.
  bool goes_on = false;
  // The CPU's executors call this first: it waits until the GPU has finished with the parts and has checked
  // the gradient, and verifies the checksums of what was read.
  std::function<void()> prepare = {};
  bool applies() const { return round == bucket.rounds; }
};

// Adds up over the ranks what each has summed over its part of a parameter (optim::Rounds::sums()), where its
// unit is partitioned. Collective: every rank calls it for the same parameters in the same order.
class PartsOfOthers {
 public:
  virtual ~PartsOfOthers() = default;
  // Waits for the other ranks. Afterwards each value is the sum over all parts.
  virtual void add(UnitId unit, const optim::PartSums& sums) = 0;
};

// Computes updates whose parts are in memory, on a processor and threads of its choice. Works begin in the
// order in which they are given, except those of a hurried unit. Thread rule: one thread at a time; `done`
// may be called on another.
class UpdateExecutor {
 public:
  virtual ~UpdateExecutor() = default;
  // Takes the memory for rounds. Called once, before the first work.
  virtual void start(allocator::Ledger& ledger) = 0;
  // Calls `done` once when the work has ended, with its error or null: before begin() returns, or later on
  // another thread. `done` does not throw. Until then the caller keeps everything unchanged that the work
  // refers to.
  virtual void begin(const ChunkWork& work, Done done) = 0;
  // Works of this unit, if any, come before those of other units that wait for a thread.
  virtual void hurry(std::optional<UnitId> /*unit*/) {}
  // The threads on which a caller, or `done`, may compute meanwhile.
  virtual Threads& threads() = 0;
  virtual double seconds() const = 0;  // time spent on works so far
};

struct ExecutorTools {
  Threads& threads;
  kernels::F32Products* products = nullptr;  // REQUIRES: not null where the optimizer has products
  Trace* trace = nullptr;
  PartsOfOthers* others = nullptr;  // null: this process has all of every parameter
};

// The executor for the CPU. begin() computes on the tools' threads, and calls `done` before it returns. All
// arguments outlive it.
std::unique_ptr<UpdateExecutor> make_inline_executor(const Layout& layout, const optim::Optimizer& optimizer,
                                                     const StateFormat& format, const WholeStore& wholes,
                                                     const ExecutorTools& tools);

// Computes as many works at a time as there are executors, each on its own thread: begin() returns at once,
// and works may end in another order. REQUIRES: a single executor where the optimizer has rounds.
std::unique_ptr<UpdateExecutor> make_thread_executor(std::vector<std::unique_ptr<UpdateExecutor>> executors);

// How many chunks the CPU updates at a time beside a GPU, each on one thread, given the number of threads.
// Waking and joining all threads for each chunk would take as long as its update. Of many threads, one is
// left to the client, which queues the GPU's work.
constexpr int chunks_at_a_time(int threads) { return threads < 4 ? threads : threads - 1; }

}  // namespace sluice::engine
