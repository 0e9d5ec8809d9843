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

// The gradients of all units: one flat f32 buffer a unit for the first use of its parameters, and one a
// further use for those that have it. A buffer is a holding, so it is in memory, or on disk between groups of
// micro-batches. What comes into them, and when it is final, is the engine's to decide; here is which there
// are, and what is known of each without its elements: its squares, and a factor that multiplies it
// (unscaling, clipping), which is applied where the gradient is used. Thread rule: one thread.
class Gradients {
 public:
  Gradients(const Layout& layout, const Profile& profile, const Plan& plan, Pager& pager);

  int uses(UnitId unit) const { return static_cast<int>(units_[unit].size()); }
  HoldingId holding(UnitId unit, int use) const {
    return units_[unit][static_cast<std::size_t>(use)].holding;
  }
  std::size_t bytes(UnitId unit, int use) const {
    return units_[unit][static_cast<std::size_t>(use)].elements * sizeof(float);
  }
  float* data(ParameterId parameter, int use) const;  // REQUIRES: its buffer is held
  Dtype final_type(UnitId unit) const { return final_types_[unit]; }
  std::size_t final_bytes(UnitId unit) const {
    return layout_.unit_elements(unit) * size_of(final_type(unit));
  }

  // --- the unit's buffer is held ---
  // The parameter has what was added, or is final, from now on.
  void add(Threads& threads, ParameterId parameter, ConstArray gradient);          // sums squares on the way
  void sum_squares_of(Threads& threads, ParameterId parameter, const void* base);  // base: of the unit's
  void read(Threads& threads, ParameterId parameter, Array out) const;             // REQUIRES: has(parameter)

  // --- it need not be held ---
  bool has(ParameterId parameter) const { return known_[parameter].there; }
  bool any(UnitId unit) const;  // whether one of its parameters has
  void multiply(ParameterId parameter, double factor) { known_[parameter].factor *= factor; }
  double factor(ParameterId parameter) const { return known_[parameter].factor; }
  double norm(ParameterId parameter) const;
  // Over all parameters. The squares of one are a tree over its grid, whatever units it spans; parameters are
  // added in registration order.
  double norm() const;
  std::optional<ParameterId> not_finite(UnitId unit) const;
  std::optional<ParameterId> not_finite() const;
  void drop(ParameterId parameter) { known_[parameter] = {}; }  // the parameter has no gradient then
  void drop_unit(UnitId unit);
  void drop_all();
  // The unit's gradients are an update's: nobody has them any more, but their norm counts.
  void hand_over(UnitId unit);

 private:
  struct Buffer {
    HoldingId holding = 0;
    std::size_t elements = 0;
    std::vector<std::size_t> offsets;  // by parameter of the unit; SIZE_MAX: has no such use
  };
  struct Known {
    bool there = false;
    kernels::SquareSum squares;  // of the buffer, without the factor
    double factor = 1;
  };

  const Layout& layout_;
  Pager& pager_;
  std::vector<std::vector<Buffer>> units_;
  std::vector<Dtype> final_types_;  // by unit
  std::vector<Known> known_;        // by parameter
};

}  // namespace sluice::engine
