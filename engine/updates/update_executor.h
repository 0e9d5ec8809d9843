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
  std::uint64_t step = 0;      // the number of this update, from 1; 0: there is none
  double gradient_factor = 1;  // multiplies the factor of its group
};

// The update of one unit: which settings are applied, and where its parts are.
struct Update {
  UnitId unit = 0;
  std::optional<Pass> pass = {};  // a pass of a joint update; nothing: all of the unit's own update
  std::vector<optim::Hyperparameters> groups;
  std::vector<ParameterUpdate> parameter_updates;  // by parameter of the unit
  // The unit's home, held until the update is applied; data is null where this pass needs no parameters, or
  // where those that this rank updates are streamed through parameters_backing.
  Array parameters;
  std::size_t first_parameter = 0;  // the element of the unit with which they begin
  Backing* parameters_backing = nullptr;
  std::size_t parameters_backing_bytes = 0;
  // Begins with the first element that this rank updates. In memory; where data is null, it is streamed from
  // gradient_backing.
  ConstArray gradient;
  Backing* gradient_backing = nullptr;
  std::size_t gradient_backing_bytes = 0;
  Dtype gradient_type = Dtype::kF32;
  // Whether the backings begin with the unit's first element, and not with this rank's.
  bool whole_backings = false;
  // Where a GPU says that nothing is to be changed: see DeviceGradients::check(). Null: the gradient is known
  // to be finite.
  const std::uint32_t* refused = nullptr;
  // Called once, on any thread, when the parameters are changed, where these lie in memory and the update has
  // no error; null: nobody else waits for that. It must not throw.
  std::function<void()> on_changed = {};
  // REQUIRES: the CPU updates, and has waited for what the GPU says.
  bool is_refused() const { return refused != nullptr && *refused != 0; }
};

// The unit of computing: what one chunk has of a bucket, in one round or in the application.
struct ChunkWork {
  const Update& update;
  const Bucket& bucket;
  int round = 0;                     // Bucket::rounds stands for the application
  std::optional<std::size_t> chunk;  // nothing: the bucket has no elements here
  std::byte* state = nullptr;  // the chunk's state in StateFormat's layout; unspecified bytes where the round
                               // reads none
  ConstArray gradient = {};
  Array parameters = {};                          // data is null where there is no need of them
  std::size_t first_parameter = 0;                // the element of the unit with which they begin
  bool begins_round = false, ends_round = false;  // after the end of a round its results are combined
  // The next chunk's work follows at once, with its parts beside this one's, so that the executor may wait
  // with the work for that one's, also where `done` says that it has ended.
  bool goes_on = false;
  // What the CPU's executors call first, where they compute: it waits for what a GPU still does with the
  // parts, and finds.
  std::function<void()> prepare = {};
  bool applies() const { return round == bucket.rounds; }
};

// Adds up what each rank has summed over its part of a parameter (optim::Rounds::sums()), where each has a
// part of its unit. Every rank calls it for the same parameters in the same order.
class PartsOfOthers {
 public:
  virtual ~PartsOfOthers() = default;
  // Waits for the other ranks. Afterwards each value is the sum over all parts.
  virtual void add(UnitId unit, const optim::PartSums& sums) = 0;
};

// Computes updates whose parts are in memory, on a processor and threads of its choice. Works begin in the
// order in which they are given, but for those of a unit that somebody waits for. Thread rule: one thread at
// a time; `done` may come from another.
class UpdateExecutor {
 public:
  virtual ~UpdateExecutor() = default;
  // Takes the memory for rounds. Called once, before the first work.
  virtual void start(allocator::Ledger& ledger) = 0;
  // Calls `done` once when the work has ended, with its error or null: before it returns, or later from
  // another thread. It does not throw. Until then the caller keeps everything that the work refers to
  // unchanged.
  virtual void begin(const ChunkWork& work, Done done) = 0;
  // Whose works come first, if any, where several units' works wait for a thread.
  virtual void hurry(std::optional<UnitId> /*unit*/) {}
  // The threads on which a caller, or a `done`, may compute meanwhile.
  virtual Threads& threads() = 0;
  virtual double seconds() const = 0;  // how long works have taken so far
};

struct ExecutorTools {
  Threads& threads;
  kernels::F32Products* products = nullptr;  // REQUIRES: not null where the optimizer has products
  Trace* trace = nullptr;
  PartsOfOthers* others = nullptr;  // null: this process has all of every parameter
};

// The executor for the CPU. begin() computes on the tools' threads, and calls `done` before it returns.
// Everything that is handed in outlives it.
std::unique_ptr<UpdateExecutor> make_inline_executor(const Layout& layout, const optim::Optimizer& optimizer,
                                                     const StateFormat& format, const WholeStore& wholes,
                                                     const ExecutorTools& tools);

// Computes as many works at a time as there are executors, each on a thread of its own: begin() returns at
// once, and works may end in another order. REQUIRES: one alone where the optimizer has rounds.
std::unique_ptr<UpdateExecutor> make_thread_executor(std::vector<std::unique_ptr<UpdateExecutor>> executors);

// How many chunks the CPU updates at a time beside a GPU, each on one thread, of so many threads. Waking and
// joining all of them for each chunk would take as long as its update. Of many, one is left to the client,
// which queues the GPU's work.
constexpr int chunks_at_a_time(int threads) { return threads < 4 ? threads : threads - 1; }

}  // namespace sluice::engine
