#pragma once
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "engine/layout.h"
#include "engine/step/gradients.h"
#include "engine/step/update_pipeline.h"
#include "engine/store/pager.h"

namespace sluice::engine {

// The updates that are due: each starts when its turn comes, or when somebody needs the unit, and then brings
// together parameters, gradient and state. An update that units have together is one pass over one of them
// after another (see batches.h); from its first pass to its last no other update starts, and those that are
// due before it start before it. Thread rule: one thread.
class UpdateQueue {
 public:
  // What a unit's update applies, as it was decided.
  struct Due {
    std::vector<optim::Hyperparameters> groups;
    std::vector<ParameterUpdate> parameters;
    bool holds_gradient = false, holds_parameters = false;  // until it was applied
  };

  // parameters: the holding of each unit. All outlive this.
  UpdateQueue(const Layout& layout, const optim::Optimizer& optimizer, Pager& pager, Gradients& gradients,
              UpdatePipeline& pipeline, Waits& waits, const std::vector<HoldingId>& parameters);

  // units: all that are updated together, a `due` for each. REQUIRES: they are current, and their gradients
  // final.
  void add(UnitRange units, std::vector<Due> due);
  bool current(UnitId unit) const { return phases_[unit] == Phase::kCurrent; }  // no update is pending

  void advance();  // goes on with what has arrived; never waits
  void ensure_updated(UnitId unit);
  // Starts what units have together and is due, waiting as need be. An update that holds memory is not added
  // behind such a one, which might not get what it needs then.
  void start_shared();
  bool finish_some();  // waits until some update gives up its memory; false where none is under way
  void settle();
  // The client takes back what it lent before that byte: nothing more goes into any of it.
  void take_back(std::size_t until);

 private:
  enum class Phase : std::uint8_t { kCurrent, kWaiting, kRunning };
  // A unit's update, or a pass of one that it has together with others.
  struct Work {
    UnitId unit = 0;
    std::optional<Pass> pass = {};
    bool operator==(const Work&) const = default;
    bool goes_on() const { return pass && !(pass->round == 0 && pass->first); }
  };
  struct Held {  // by a work that was started
    bool parameters = false, gradient = false;
  };
  bool start(const Work& work, bool wait);
  void start_for(UnitId unit);
  void start_waiting();
  void on_applied(const Work& work, const Held& held);
  void finish(UnitId unit);
  void wait(std::size_t lent_until = 0);

  const Layout& layout_;
  const optim::Optimizer& optimizer_;
  Pager& pager_;
  Gradients& gradients_;
  UpdatePipeline& pipeline_;
  Waits& waits_;
  const std::vector<HoldingId>& parameters_;
  std::vector<Phase> phases_;
  std::vector<Due> due_;
  std::deque<Work> waiting_;
  std::optional<Work> starting_;  // it waits for memory: meanwhile neither it nor any pass is started
};

}  // namespace sluice::engine
