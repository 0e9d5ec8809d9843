#pragma once
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/error.h"
#include "engine/steps/engine.h"
#include "engine/steps/refusal.h"
#include "engine/steps/stores.h"
#include "engine/steps/values.h"

// Private to this room.
namespace sluice::engine {

// The base of both kinds of engine: the stores, and what the steps of both kinds share. It does not know the
// order in which units are accessed. Its functions throw; calls on an engine go through guarded().
struct Core : Stores {
  Core(const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer,
       const Resources& resources);

  // Returns action(*this). An error other than a Refusal leaves the engine failed.
  template <class Action>
  auto guarded(Action&& action) {
    if (!failure.empty())
      fail(ErrorCode::kState, "the engine has failed: {}; make another, and go on from the last checkpoint",
           failure);
    try {
      return action(*this);
    } catch (const Refusal&) {
      throw;
    } catch (const std::exception& error) {  // also an error of a source, in load_all(), or of the allocator
      fail_with(error.what());
      throw;
    } catch (...) {
      fail_with("an exception of an unknown type");
      throw;
    }
  }
  void fail_with(const std::string& why);     // reports to the other ranks, too
  void tell_ranks(const std::string& error);  // reports an error that ends the run

  // A step. Each kind of engine decides when gradients are final, and which updates become due.
  void begin_step(const StepSettings& given);
  void check_settings(const StepSettings& given) const;
  // The norm of all gradients before clipping, and the first parameter whose gradient is not finite.
  // Collective over the sections of a model, where there are any.
  struct Measured {
    StepResult result;
    std::optional<std::string> not_finite;
  };
  Measured measure();
  // UpdateQueue::serve_ranks(), and Values::serve(); an error is reported to the other ranks.
  void serve_ranks();
  // Collective: makes the squares of these gradients known to all ranks, where each knows only its shard's.
  void gather_squares(std::span<const ParameterId> of);
  // Waits for other ranks, and advances updates meanwhile.
  void wait_for_ranks(const std::string& what, TransferGroup& group);
  void clip(StepResult& result);
  // Whether all gradients are finite, and f32 can represent their norm, and so every element.
  static bool usable(const Measured& measured);
  [[noreturn]] void refuse_not_finite(const Measured& measured) const;
  // Makes the update of these units due, with a copy of the settings. It updates each parameter that has a
  // gradient. An update that follows its gradient at once pins the parameters until it is applied;
  // with_parameters: also those that are not in memory.
  void enqueue(UnitRange units, bool with_parameters);

  Values values;
  StepSettings settings;  // of the present step
  double clip_factor = 1;
  std::uint64_t steps = 0;
  std::vector<std::uint64_t> applied;  // by parameter: how many steps have updated it
  std::vector<std::uint64_t> changes;  // by unit: how often its state was changed, or is due to be
  bool in_step = false;
  std::string failure;  // the cause of failure; empty: none

 private:
  UpdateQueue::Due due_of(UnitId unit);
  void entrust(UnitId unit);
  bool entrusts_gradient(UnitId unit) const;
  void keep_until_applied(UnitId unit, bool with_parameters, UpdateQueue::Due& due);
};

}  // namespace sluice::engine
