#pragma once
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <vector>

#include "engine/gradients/gradient_parts.h"
#include "engine/gradients/gradients.h"
#include "engine/layout/layout.h"
#include "engine/memory/device_ranks.h"
#include "engine/memory/pager.h"
#include "engine/memory/parameter_shards.h"
#include "engine/ranks/ranks.h"
#include "engine/updates/update_pipeline.h"

namespace sluice::engine {

// The updates that are due. Each starts when its turn comes, or when somebody needs the unit, and then brings
// in parameters, gradient and state. A joint update is a series of passes, each over one of its units (see
// buckets.h). From its first pass to its last no other update starts, and updates that became due earlier
// start before it. Where only state is partitioned, an update ends with an all-gather of the updated
// parameters. Thread rule: one thread.
class UpdateQueue {
 public:
  // The update to apply to a unit, with the settings from when it became due.
  struct Due {
    std::vector<optim::Hyperparameters> groups;
    std::vector<ParameterUpdate> parameters;
    const std::uint32_t* refused = nullptr;                 // see Update
    bool holds_gradient = false, holds_parameters = false;  // until the update is applied
  };

  // For units whose state is partitioned; null where there are none.
  struct Parts {
    Ranks* ranks = nullptr;
    ParameterShards* parameters = nullptr;
    const GradientParts* gradients = nullptr;
    // Final gradients are those of whole units, and not this rank's shard. They are brought in for an update,
    // since a shard does not begin at a block of the record.
    bool whole_gradients = false;
    // On a GPU: how parameters that other ranks have updated arrive.
    DeviceWork* gpu = nullptr;
    DeviceRanks* on_gpu = nullptr;
    Threads* threads = nullptr;  // for copies in host memory
  };
  // `parameters` has each unit's holding. All arguments outlive the queue.
  UpdateQueue(const Layout& layout, const optim::Optimizer& optimizer, Pager& pager, Gradients& gradients,
              UpdatePipeline& pipeline, Waits& waits, const std::vector<HoldingId>& parameters,
              const Parts& parts);

  // Adds the update of one unit, or the joint update of several; `due` has an entry for each. REQUIRES: the
  // units are current, and their gradients final.
  void add(UnitRange units, std::vector<Due> due);
  bool current(UnitId unit) const { return phases_[unit] == Phase::kCurrent; }  // no update is pending

  // Whether the unit's update needs its parameters, or its gradient, on the device that computes.
  bool needs_frames(UnitId unit, HoldingId holding) const;

  void advance();  // does what it can without waiting
  // On a GPU: starts all updates that can start without a wait.
  void start_all();
  // For a caller that waits for other ranks, which may wait for updates of this one. May wait for the disk.
  void serve_ranks();
  // advance() for a pager that waits for a transfer; does nothing if an update of this queue made it wait.
  void advance_while_waiting();
  void ensure_updated(UnitId unit);  // waits until the unit is current
  // Starts every joint update that is due, and waits as needed. An update that holds memory must not be added
  // behind a joint one, which might then lack memory.
  void start_shared();
  bool finish_some();  // waits until an update releases memory; false where none is in progress
  bool settled() const { return waiting_.empty() && idle(); }  // every update is complete
  void settle();                                               // waits for that
  // Waits until no other rank needs a call of this one: the updates that remain complete on other threads.
  void settle_for_others();
  // Waits for updates that complete without calls, unless there is an error.
  void end_what_goes_on_alone() noexcept;
  // Waits until no transfer uses lent memory before this offset; no further chunk goes into any of it.
  void take_back(std::size_t until);

 private:
  enum class Phase : std::uint8_t { kCurrent, kWaiting, kRunning, kGathering };
  // The update of a unit, or one pass of a joint update.
  struct Task {
    UnitId unit = 0;
    std::optional<Pass> pass = {};
    bool operator==(const Task&) const = default;
    bool goes_on() const { return pass && !(pass->round == 0 && pass->first); }
  };
  // The holdings that a started task has pinned in the pager.
  struct Pins {
    bool parameters = false, gradient = false;
  };
  // An all-gather of parameters that other ranks have updated, into ones that are held, or lie in host
  // memory.
  struct Gather {
    UnitId unit = 0;
    bool held = false;
    TransferGroup group = {};
  };
  bool start(const Task& task, bool wait);
  void start_by_cpu(const Task& task, Update& update, const Pins& pins);
  void start_for(UnitId unit);
  void start_waiting();
  void on_applied(const Task& task, const Pins& pins);
  // Whether the unit's update, once started, completes without further calls. It changes only this rank's
  // shard, which the thread that completes it publishes.
  bool goes_on_alone(UnitId unit) const {
    return partitions_parameters(unit) && pipeline_.by_cpu(unit) && optimizer_.rounds() == 0;
  }
  bool is_alone(UnitId unit) const { return phases_[unit] == Phase::kRunning && goes_on_alone(unit); }
  template <class Condition>
  void settle_until(const Condition& is_settled);
  bool go_on();  // does what it can without waiting; false: nothing
  bool idle() const { return pipeline_.idle() && gathers_.empty(); }
  void begin_gather(UnitId unit, bool held);
  void gather_beside_gpu(Gather& gather);
  bool finish_gathers();
  void complete(UnitId unit, bool held);
  bool partitions_parameters(UnitId unit) const {
    return parts_.parameters != nullptr && parts_.parameters->has(unit);
  }
  // Whether this rank updates a shard of the unit; whether its update then ends with an all-gather.
  bool is_cut(UnitId unit) const { return parts_.ranks != nullptr && parts_.ranks->partitioned(unit); }
  bool is_gathered(UnitId unit) const { return is_cut(unit) && !partitions_parameters(unit); }
  // Whether this rank keeps its shard of the gradient alone, apart from its buffer.
  bool has_gradient_part(UnitId unit) const {
    return parts_.gradients != nullptr && parts_.gradients->has(unit);
  }
  void finish(UnitId unit);
  void wait(std::size_t lent_until = 0);

  const Layout& layout_;
  const optim::Optimizer& optimizer_;
  Pager& pager_;
  Gradients& gradients_;
  UpdatePipeline& pipeline_;
  Waits& waits_;
  const std::vector<HoldingId>& parameters_;
  const Parts parts_;
  // All ranks must start updates in the same order, because the rounds of an optimizer, or gathers on GPUs,
  // wait for the other ranks.
  const bool ordered_;
  std::vector<Phase> phases_;
  std::vector<Due> due_;
  std::deque<Task> waiting_;
  std::list<Gather> gathers_;
  // On a GPU: units in the order in which all ranks gather them, and those that are updated here already,
  // with Gather::held.
  std::deque<UnitId> to_gather_;
  std::map<UnitId, bool> may_gather_;
  // Waits for memory; until it has that, neither it nor any pass is started again.
  std::optional<Task> starting_;
  bool going_on_ = false;
};

}  // namespace sluice::engine
