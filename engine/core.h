#pragma once
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "engine/engine.h"
#include "engine/refusal.h"
#include "engine/step/batches.h"
#include "engine/step/gradients.h"
#include "engine/step/update_pipeline.h"
#include "engine/step/update_queue.h"
#include "engine/store/backing.h"
#include "engine/store/pager.h"
#include "engine/store/state_store.h"
#include "engine/store/unit_values.h"
#include "engine/store/waits.h"
#include "engine/store/whole_store.h"

// Private to this room.
namespace sluice::engine {

// What every engine is made of: where units, gradients and state are, the updates that are due, and what is
// common to the steps of both kinds. It knows nothing of the order in which units come. Its functions throw;
// the engines' calls go through guarded().
struct Core {
  Core(const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer,
       const Resources& resources);

  const std::string& name_of(UnitId unit) const { return layout.units()[unit].name; }
  UnitRange together(UnitId unit) const { return updated_together(layout, optimizer, unit); }
  ValueStreams streams() { return {layout, states, updates, resources}; }
  void set_schedule(const std::vector<Access>& accesses);  // the pager's

  // action(*this); an error other than a refusal leaves the engine failed.
  template <class Action>
  auto guarded(Action&& action) {
    if (!failure.empty())
      fail(ErrorCode::kState, "the engine has failed: {}; make another, and go on from the last checkpoint",
           failure);
    try {
      return action(*this);
    } catch (const Refusal&) {
      throw;
    } catch (const std::exception& error) {  // also of a source that load_all() calls, or of the allocator
      failure = error.what();
      throw;
    } catch (...) {
      failure = "an exception of an unknown type";
      throw;
    }
  }

  // Values. What the caller's function throws is given back, and leaves the core whole.
  void require_values(UnitId unit) const;
  std::exception_ptr load(UnitId unit, const UnitSource& source);
  std::exception_ptr save(UnitId unit, const UnitSink& sink);
  void settle();

  // A step. A kind of engine decides when gradients are final, and which updates are due.
  void begin_step(const StepSettings& given);
  void check_settings(const StepSettings& given) const;
  StepResult measure() const;  // of all gradients; nothing is clipped yet
  void clip(StepResult& result);
  static bool representable(double norm);  // no element is larger than the norm of all
  [[noreturn]] void refuse_not_finite(std::optional<ParameterId> parameter, double norm) const;
  // Their update becomes due, with a copy of the settings: each parameter that has a gradient is updated.
  // with_parameters: one that follows its gradient at once keeps the parameters in memory until it is
  // applied, wherever they are; else only where they are there.
  void enqueue(UnitRange units, bool with_parameters);

  // The end, and another plan, for what is checked already.
  void leave(bool with_values, const std::function<void(UnitId, allocator::FormerHome)>& take);
  void replan(const Plan& next);

  Resources resources;
  const optim::Optimizer& optimizer;
  Plan plan;
  Layout layout;
  Waits waits;
  std::unique_ptr<Backings> backings;
  Pager pager;
  Gradients gradients;
  StateStore states;
  WholeStore wholes;
  std::unique_ptr<UpdateExecutor> executor;
  UpdatePipeline updates;
  std::vector<HoldingId> parameters;  // by unit
  UpdateQueue queue;

  std::vector<bool> has_values;  // by unit
  StepSettings settings;         // of this step
  double clip_factor = 1;
  std::uint64_t steps = 0;
  std::vector<std::uint64_t> applied;  // by parameter: its updates so far
  bool in_step = false;
  std::string failure;  // empty: it has not failed

 private:
  static std::vector<allocator::Tier> state_tiers(const Plan& plan);
  std::vector<optim::Hyperparameters> hyperparameters() const;
  UpdateQueue::Due due_of(UnitId unit);
  void keep_until_applied(UnitId unit, bool with_parameters, UpdateQueue::Due& due);
  void take_disk(const Plan& next);  // for what leaves memory
  void place(const Plan& next, bool resident);
};

}  // namespace sluice::engine
