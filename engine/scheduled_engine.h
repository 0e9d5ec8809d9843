#pragma once
#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "engine/engine.h"

namespace sluice::engine {

// What is written for one use of one parameter by one micro-batch: f32, [elements of the parameter].
struct GradientTarget {
  float* data = nullptr;
  bool accumulate = false;  // add to what is there; else overwrite all of it
};

// An engine whose client goes by the schedule of the profile, and writes gradients where it is told to. Calls
// of a step, in order: begin_step; for each group of micro-batches, the accesses of the schedule, each
// acquire ... release; step. The update of a unit follows at once when its gradient is final, or (clipping)
// is due at its next acquire; see "One step" in docs/architecture.md. Values are loaded and saved between
// steps.
class ScheduledEngine final : public Engine {
 public:
  // As Engine's.
  ScheduledEngine(const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer,
                  const Resources& resources);

  void begin_step(const StepSettings& settings);
  void acquire(const Access& access);  // the next one of the schedule
  void release(const Access& access);
  // micro_batch: index within the step, ascending for each use. REQUIRES: acquired with that gradient use.
  GradientTarget gradient(ParameterId parameter, int use, std::size_t micro_batch);
  // After the last group. Throws Error(kNotFinite) naming a parameter whose gradient is not finite; where
  // updates wait for step() the parameters are then unchanged and the engine goes on, else it has failed, and
  // it is the release() of that gradient that throws.
  StepResult step();

  // For evaluation: parameters of one unit at any time outside of a step, in any order.
  void acquire_for_reading(UnitId unit);
  void release_from_reading(UnitId unit);

  // The client has memory that it does not need from the end of backward into the next forward pass: states
  // on disk are read ahead into it for the updates that the next step needs first, and written from there.
  // All of that memory; outside of a step. It outlives end_lending().
  void set_lendable(std::span<std::byte> memory);
  void lend(std::size_t from);        // its bytes from there on, in the backward pass of the last group
  void take_back(std::size_t until);  // waits until those before that byte are the client's again
  // Takes all of it back; where the engine has failed, too.
  void end_lending() noexcept;

 private:
  void check_load(UnitId unit) const override;
  void check_save(UnitId unit) const override;
  void check_between_steps(UnitId unit, const char* verb) const;
  void require_next(const Access& asked) const;
  Access take_held(const Access& access);
  void store_gradient(UnitId unit, int use);
  void finish_gradient(UnitId unit);
  std::optional<ParameterId> add_uses(UnitId unit);
  bool have_final_gradients(UnitRange units) const;
  void enqueue(UnitRange units);
  [[noreturn]] void skip_step(double norm);

  std::vector<Access> accesses_;  // of a whole step
  std::size_t position_ = 0;      // of the next one
  std::vector<Access> held_;
  std::vector<std::vector<std::optional<std::size_t>>> written_;  // by parameter and use: last micro-batch
  std::vector<bool> finished_;                                    // by unit: its gradient is final
  std::optional<ParameterId> not_finite_;                         // the first one of this step
  std::vector<UnitId> needed_first_;  // of which the state is read ahead, the last one of them first
  std::vector<UnitId> unforeseen_;    // of these, in this step
};

}  // namespace sluice::engine
