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

// What both kinds of engine are built on: the stores, and what the steps of both kinds share. It knows
// nothing of the order in which units are accessed. Its functions throw; the calls on an engine go through
// guarded().
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
  void fail_with(const std::string& why);     // tells the other ranks, too
  void tell_ranks(const std::string& error);  // of an error that ends the run

  // A step. Each kind of engine decides when gradients are final, and which updates become due.
  void begin_step(const StepSettings& given);
  void check_settings(const StepSettings& given) const;
  // The norm of all gradients, before clipping, and the first parameter whose gradient is not finite.
  // Collective over the sections of a model, where there are any.
  struct Measured {
    StepResult result;
    std::optional<std::string> not_finite;
  };
  Measured measure();
  void serve_ranks();  // UpdateQueue::serve_ranks(); an error is also the other ranks'
  // Makes what each rank knows of its part of these gradients known to all, where they are in parts.
  void gather_squares(std::span<const ParameterId> of);
  // Queues that this rank's part of the means of these parameters is kept, where the plan keeps it alone of
  // their unit: in the GPU's memory, or the host's. REQUIRES: the unit's gradient is held, in frames of a
  // GPU.
  void keep_gradient_shard(UnitId unit, std::span<const ParameterId> of);
  // Waits for other ranks, and goes on with updates meanwhile.
  void wait_for_ranks(const std::string& what, TransferGroup& group);
  void clip(StepResult& result);
  // Whether all gradients are finite, and f32 can hold their norm, and so every element.
  static bool usable(const Measured& measured);
  [[noreturn]] void refuse_not_finite(const Measured& measured) const;
  // Makes the update of these units due, with a copy of the settings. Each parameter that has a gradient is
  // updated. Where an update follows its gradient at once, it holds the parameters until it is applied:
  // with_parameters says whether also those that are not in memory.
  void enqueue(UnitRange units, bool with_parameters);

  Values values;
  StepSettings settings;  // of the present step
  double clip_factor = 1;
  std::uint64_t steps = 0;
  std::vector<std::uint64_t> applied;  // how often each parameter was updated
  bool in_step = false;
  std::string failure;  // why the engine has failed; empty: it has not

 private:
  UpdateQueue::Due due_of(UnitId unit);
  void entrust(UnitId unit);
  bool entrusts_gradient(UnitId unit) const;
  void keep_until_applied(UnitId unit, bool with_parameters, UpdateQueue::Due& due);
};

}  // namespace sluice::engine
