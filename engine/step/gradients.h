#pragma once
#include <cstddef>
#include <optional>
#include <vector>

#include "core/threads.h"
#include "engine/layout.h"
#include "engine/plan/plan.h"
#include "engine/store/pager.h"
#include "kernels/reduce.h"

namespace sluice::engine {

// The accumulators of all units: one flat f32 buffer a unit for the first use of its parameters, and one a
// further use for those that have it. A buffer is a holding, so it is in memory, or on disk between groups of
// micro-batches. In any order there is one use, the gradients stay in f32, and each has a factor that
// multiplies it (unscaling, clipping): it is applied where the gradient is used. Thread rule: one thread.
class Gradients {
 public:
  // uses: buffers of each unit; see gradient_uses().
  Gradients(const Layout& layout, const std::vector<int>& uses, const Plan& plan, bool any_order,
            Pager& pager);

  int uses(UnitId unit) const { return static_cast<int>(units_[unit].size()); }
  HoldingId holding(UnitId unit, int use) const {
    return units_[unit][static_cast<std::size_t>(use)].holding;
  }
  std::size_t bytes(UnitId unit, int use) const {
    return units_[unit][static_cast<std::size_t>(use)].elements * sizeof(float);
  }

  // Where a micro-batch writes. Throws Error(kState) where micro-batches come out of order.
  float* target(ParameterId parameter, int use, std::size_t micro_batch, bool* accumulate);

  bool any(UnitId unit) const;            // whether the step has one of the unit's parameters
  bool has(ParameterId parameter) const;  // or this one's

  // --- in any order; the unit's buffer is held, where not said otherwise ---
  void add(Threads& threads, ParameterId parameter, ConstArray gradient);  // sums squares on the way
  // Whether anything was added since it was asked last.
  bool take_changed(UnitId unit);
  void read(Threads& threads, ParameterId parameter, Array out) const;  // REQUIRES: has(parameter)
  void multiply(ParameterId parameter, double factor);                  // need not be held
  double factor(ParameterId parameter) const { return progress_[parameter].factor; }
  void drop(ParameterId parameter);  // need not be held: the parameter has no gradient then
  void drop_unit(UnitId unit);       // likewise
  void drop_all();                   // likewise
  // The unit's gradients are an update's: it has none of this step any more, but their norm counts. Need not
  // be held.
  void hand_over(UnitId unit);
  double norm(ParameterId parameter) const;                  // need not be held
  std::optional<ParameterId> not_finite() const;             // likewise
  std::optional<ParameterId> not_finite(UnitId unit) const;  // likewise
  // Whether its buffer is needed after the update that it is for.
  bool kept(UnitId unit) const { return outlive_step_ && any(unit); }

  // Makes the unit's gradient final, all its uses being held: adds them, rounds once to the compute type (a
  // narrow gradient is then packed into the first half of the buffer), sums squares. Returns a parameter
  // whose gradient is not finite, if there is one.
  std::optional<ParameterId> finish(Threads& threads, UnitId unit);
  Dtype final_type(UnitId unit) const { return any_order_ ? Dtype::kF32 : layout_.dtype(unit); }
  std::size_t final_bytes(UnitId unit) const {
    return layout_.unit_elements(unit) * size_of(final_type(unit));
  }

  // Over all parameters. The squares of one are a tree over its grid, whatever units it spans; parameters are
  // added in registration order.
  double norm() const;
  void begin_step();  // where they may outlive a step, it begins with those that were not dropped

 private:
  struct Buffer {
    HoldingId holding = 0;
    std::size_t elements = 0;
    std::vector<std::size_t> offsets;  // by parameter of the unit; SIZE_MAX: has no such use
  };
  struct Progress {
    std::vector<std::optional<std::size_t>> last;  // by use: the last micro-batch that wrote
    kernels::SquareSum squares;                    // of the buffer, without the factor
    double factor = 1;
  };
  void sum_squares_of(Threads& threads, ParameterId parameter, const void* base);
  float* data(ParameterId parameter, int use) const;

  const Layout& layout_;
  Pager& pager_;
  bool any_order_, outlive_step_;
  std::vector<std::vector<Buffer>> units_;
  std::vector<Progress> progress_;  // by parameter
  std::vector<bool> changed_;       // by unit
};

}  // namespace sluice::engine
