#pragma once
#include <cstdint>
#include <deque>
#include <vector>

#include "engine/layout.h"
#include "engine/step/gradients.h"
#include "engine/step/update_pipeline.h"
#include "engine/store/pager.h"

namespace sluice::engine {

// The updates that are due: each starts when its turn comes, or when somebody needs the unit, and then brings
// together parameters, gradient and state. Thread rule: one thread.
class UpdateQueue {
 public:
  // What a unit's update applies, as it was decided.
  struct Due {
    std::vector<optim::Hyperparameters> groups;
    std::vector<ParameterUpdate> parameters;
    bool holds_gradient = false, holds_parameters = false;  // until it was applied
  };

  // parameters: the holding of each unit. All outlive this.
  UpdateQueue(const Layout& layout, Pager& pager, Gradients& gradients, UpdatePipeline& pipeline,
              Waits& waits, const std::vector<HoldingId>& parameters);

  // REQUIRES: current(unit), and its gradient is final.
  void add(UnitId unit, Due due);
  bool current(UnitId unit) const { return phases_[unit] == Phase::kCurrent; }  // no update is pending

  void advance();  // goes on with what has arrived; never waits
  void ensure_updated(UnitId unit);
  bool finish_some();  // waits until some update gives up its memory; false where none is under way
  void settle();
  // The client takes back what it lent before that byte: nothing more goes into any of it.
  void take_back(std::size_t until);

 private:
  enum class Phase : std::uint8_t { kCurrent, kWaiting, kRunning };
  bool start(UnitId unit, bool wait);
  void start_waiting();
  void on_applied(UnitId unit, bool gradient_in_memory);
  void wait(std::size_t lent_until = 0);

  const Layout& layout_;
  Pager& pager_;
  Gradients& gradients_;
  UpdatePipeline& pipeline_;
  Waits& waits_;
  const std::vector<HoldingId>& parameters_;
  std::vector<Phase> phases_;
  std::vector<Due> due_;
  std::deque<UnitId> waiting_;
};

}  // namespace sluice::engine
