#pragma once
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
#include "engine/step/recorder.h"
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

// What an engine holds, and the parts of a step that both kinds of client share. The accesses of a schedule
// are in step/in_order.cc, those of any order in step/any_order.cc.
struct Engine::State {
  State(const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer,
        const Resources& resources);

  static std::vector<allocator::Tier> state_tiers(const Plan& plan);
  const std::string& name_of(UnitId unit) const { return layout.units()[unit].name; }
  ValueStreams streams() { return {layout, states, updates, resources}; }
  std::vector<HoldingId> holdings_of(const Access& access) const;
  // In step/due.cc: an update becomes due, with a copy of the settings. units: all that it takes together.
  UnitRange together(UnitId unit) const { return updated_together(layout, optimizer, unit); }
  void enqueue(UnitRange units);
  bool have_final_gradients(UnitRange units) const;
  void require_all_or_none() const;  // of the gradients of what is updated together
  void settle();
  void check_settings(const StepSettings& given) const;
  void require_reachable(UnitId unit, const char* verb) const;
  void require_values(UnitId unit) const;
  Access take_held(const Access& access);

  void leave(bool with_values, const std::function<void(UnitId, allocator::FormerHome)>& take);
  void check_replan(const Plan& next);
  void take_disk(const Plan& next);  // for what leaves memory
  void replan(const Plan& next);

  // In the order of a schedule.
  void build_schedule(const Profile& profile);
  void acquire_in_order(const Access& access);
  void release_in_order(const Access& released);
  void finish_gradient(UnitId unit);
  void set_lendable(std::span<std::byte> memory);
  void lend(std::size_t from);
  StepResult finish_step_in_order();

  // In any order.
  void acquire_in_any_order(const Access& access);
  void release_in_any_order(const Access& released);
  bool is_held(UnitId unit, bool for_gradients) const;
  void check_held_units(UnitId wanted) const;
  void acquire_for_editing(UnitId unit);
  void release_from_editing(UnitId unit);
  void add_gradient(ParameterId parameter, ConstArray gradient);
  void read_gradient(ParameterId parameter, Array out);
  void drop_gradient(ParameterId parameter);
  double gradient_norm(ParameterId parameter) const;
  void require_gradient(ParameterId parameter) const;
  void discard_unless_needed(UnitId unit);
  void update_at_once(UnitRange units);  // their gradients are final
  void abandon_step();
  void await_update(UnitId unit, bool from_record);
  [[noreturn]] void refuse_at_once(UnitRange units, ParameterId bad);
  std::vector<UnitRange> units_to_update() const;
  void end_step_without_update(bool keep_gradients);
  StepResult finish_step_in_any_order(const StepSettings& given);
  StepResult finish_step_at_once();

  // What both do at the end: the norm is known.
  static bool representable(double norm);  // no element is larger than the norm of all
  double clip_factor_of(double norm) const;
  [[noreturn]] void refuse_not_finite(std::optional<ParameterId> parameter, double norm) const;

  // An error other than a refusal leaves the engine failed.
  template <class Action>
  auto guarded(Action&& action) {
    if (!failure.empty())
      fail(ErrorCode::kState, "the engine has failed: {}; go on from the last checkpoint", failure);
    try {
      return action();
    } catch (const Refusal&) {
      throw;
    } catch (const std::exception& error) {  // also of a source that load() calls, or of the allocator
      failure = error.what();
      throw;
    } catch (...) {
      failure = "an exception of an unknown type";
      throw;
    }
  }

  Resources resources;
  const optim::Optimizer& optimizer;
  Plan plan;
  Layout layout;
  std::size_t groups;
  Waits waits;
  std::unique_ptr<Backings> backings;
  Pager pager;
  Gradients gradients;
  StateStore states;
  WholeStore wholes;
  std::unique_ptr<UpdateExecutor> executor;
  UpdatePipeline updates;
  std::vector<HoldingId> parameters;
  struct Addressed {
    const std::byte* begin;
    UnitId unit;
  };
  std::vector<Addressed> by_address;  // the units' parameters
  UpdateQueue queue;
  std::vector<Access> accesses;

  bool any_order;
  std::size_t held_units;
  Recorder recorder;

  StepSettings settings;
  std::uint64_t steps = 0;
  std::vector<std::uint64_t> applied;  // by parameter
  std::vector<bool> updated;           // likewise: at once, in this step
  std::vector<bool> has_values;        // by unit
  std::vector<bool> finished;          // likewise, in a schedule: its gradient is final
  bool in_step = false;
  std::size_t position = 0;
  std::vector<Access> held;
  double clip_factor = 1;
  std::vector<UnitId> needed_first;  // of which the state is read ahead, the last one of them first
  std::vector<UnitId> unforeseen;    // of these, in this step
  std::optional<ParameterId> bad_parameter;
  std::string failure;
};

}  // namespace sluice::engine
