#pragma once
#include <cstddef>
#include <list>
#include <optional>
#include <span>
#include <vector>

#include "comm/sums.h"
#include "core/transfers.h"
#include "engine/gradients/touched_rows.h"
#include "engine/plan/given_elements.h"
#include "engine/plan/micro_batch_sums.h"
#include "engine/ranks/packing.h"
#include "engine/steps/engine.h"

namespace sluice::engine {

// Where an op writes the gradient of one use of a parameter for one micro-batch: f32, [elements of the
// parameter].
struct GradientTarget {
  float* data = nullptr;
  bool accumulate = false;  // the op adds to what is there; otherwise it overwrites all of it
};

// An engine whose client follows the schedule of the profile, and writes gradients where the engine tells it
// to. A step is begin_step(); then acquire() ... release() for each access of the schedule, repeated for each
// group of micro-batches unless it is that of a whole step; then step(). The update of a unit follows its
// final gradient at once, or, with clipping, is due at the unit's next acquire; see "One step" in
// docs/architecture.md. Values are loaded and saved between steps.
class ScheduledEngine final : public Engine {
 public:
  // Takes all memory and disk space of the plan, as Engine() says.
  ScheduledEngine(const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer,
                  const Resources& resources);

  void begin_step(const StepSettings& settings);
  void acquire(const Access& access);  // REQUIRES: it is the next access of the schedule
  void release(const Access& access);
  // micro_batch is an index within the step, which ascends for each use. REQUIRES: the unit is acquired with
  // that gradient use.
  GradientTarget gradient(ParameterId parameter, int use, std::size_t micro_batch);
  // The same for the last use of a parameter that is by_tokens. Where the target accumulates, the client
  // writes only these rows; otherwise it also writes zeros in all others.
  GradientTarget gradient_of_rows(ParameterId parameter, int use, std::size_t micro_batch,
                                  std::span<const std::int32_t> rows);
  // Ends the step, after the last group. Throws Error(kNotFinite) that names a parameter whose gradient is
  // not finite: no parameter was changed, and the engine goes on. Where updates do not wait for step(), the
  // call in which that gradient becomes final throws (without other ranks it is release()), and the engine
  // has failed.
  StepResult step();
  // Also makes gradients final whose sums over ranks have completed: another rank's update may wait for this
  // one's.
  void serve_ranks() override;

  // For evaluation: reads the parameters of one unit, outside of a step and in any order.
  void acquire_for_reading(UnitId unit);
  void release_from_reading(UnitId unit);

  // A client lends memory that it does not need from the end of backward into the next forward pass. The
  // engine prefetches state on disk that the next step needs first into it, and writes it back from there.
  // set_lendable() is called outside of a step, with all of that memory, which stays valid until
  // end_lending() returns.
  void set_lendable(std::span<std::byte> memory);
  // Lends the bytes from this offset on, in the backward pass of the last group.
  void lend(std::size_t from);
  void take_back(std::size_t until);  // waits until the bytes before this offset are the client's again
  // Takes everything back, even after the engine has failed.
  void end_lending() noexcept;

 private:
  void check_load(UnitId unit) const override;
  void check_save(UnitId unit) const override;
  void check_between_steps(UnitId unit, const char* verb) const;
  void require_next(const Access& asked) const;
  struct Held {
    Access access;
    std::size_t waiting_from;   // the offset of its gradients that wait to be added; see Gradients::sum()
    bool ends_use = false;      // no later access writes that use of the gradient
    bool ends_reading = false;  // no later access of the step needs the unit's parameters
  };
  Held take_held(const Access& access);
  void add_waiting(ParameterId parameter, int use, std::size_t waiting_from);
  void store_gradient(const Held& held);
  // The sum of a gradient over the ranks, which overlaps with the next accesses.
  struct Sum {
    Held held;
    std::size_t position;  // of the next access, when the sum began
    TransferGroup group{};
    std::vector<std::optional<Packing>> packings{};  // of the uses whose sums have begun, from the first on
  };
  GradientTarget target(ParameterId parameter, int use, std::size_t micro_batch);
  void begin_sum(const Held& held);
  void begin_early_sum(const Held& held);
  std::vector<std::string> rows_of_ranks(UnitId unit);
  void begin_use(Sum& sum, const std::vector<std::string>& rows);
  void end_writing(UnitId unit, int use, std::size_t waiting_from);
  void fill_sums(ParameterId parameter, int use, std::size_t waiting_from);
  // The number of partial sums that this rank contributes to a gradient.
  std::size_t own_sums() const;
  void swap_uses();
  void add_uses(UnitId unit);
  bool keeps_rows_alone(ParameterId parameter, int use) const;
  Packing pack(UnitId unit, int use, const std::vector<Array>& arrays, const std::vector<std::string>& rows);
  void finish_sums(std::optional<std::size_t> may_go_on);
  std::size_t sums_in_frames() const;
  void finish_gradient(const Sum& sum);
  void unpack(const Sum& sum);
  std::optional<ParameterId> round_gradient(UnitId unit);
  bool have_final_gradients(UnitRange units) const;
  void enqueue(UnitRange units);
  void forget_step();  // drops its gradients

  std::vector<Access> accesses_;  // of a whole step
  std::size_t position_ = 0;      // the index of the next access
  std::vector<Held> held_;
  const std::optional<Twin> twin_;
  const MicroBatchSums sums_;
  const comm::SumOrder order_;  // of the ranks' sums
  const GivenElements given_;
  struct Written {
    std::optional<std::size_t> last;  // micro-batch
    bool waits = false;               // to be added to the sum
  };
  std::vector<std::vector<Written>> written_;  // by parameter and use
  std::list<Sum> sums_of_ranks_;               // of whole gradients, in the order begun
  std::list<Sum> early_sums_;                  // of uses that are final before other uses of their gradients
  std::vector<bool> ends_use_, ends_reading_;  // by access of a step
  TouchedRows touched_;
  std::vector<bool> finished_;        // by unit: whether its gradient is final
  std::vector<UnitId> needed_first_;  // units whose state is prefetched, in reverse order of need
  std::vector<UnitId> unforeseen_;    // units that are still to be foreseen in this step
};

}  // namespace sluice::engine
