#pragma once
#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "allocator/memory.h"
#include "core/bytes.h"
#include "core/threads.h"
#include "engine/gradients/device_gradients.h"
#include "engine/layout/layout.h"
#include "engine/layout/shards.h"
#include "engine/memory/pager.h"
#include "engine/plan/plan.h"
#include "engine/ranks/ranks.h"
#include "engine/ranks/sections.h"
#include "kernels/reduce.h"

namespace sluice::engine {

// The gradients of all units. Each unit has a flat f32 buffer for the first use of its parameters, and one
// for each further use, with the parameters that have such a use. A buffer is a holding of the pager, so that
// it may be on disk between groups of micro-batches. The engine decides what is added to a gradient, and when
// it is final. This class knows which gradients exist, and two things about each that do not need its
// elements: the sum of its squares, and a factor (unscaling, clipping) that is applied where the gradient is
// used. Thread rule: one thread.
class Gradients {
 public:
  // ranks: null for an engine that trains alone. gpu: null where the CPU computes; else arrays that are added
  // or read are in its memory, and used on the client's stream.
  Gradients(const Layout& layout, const Profile& profile, const Plan& plan, const Ranks* ranks, Pager& pager,
            DeviceWork* gpu = nullptr);

  // Takes the memory for gradients that wait to be added within an access (Plan::sums_bytes).
  void start(allocator::Ledger& ledger) {
    waiting_ = {ledger, allocator::Purpose::kGradient, waiting_bytes_};
    if (on_gpu_) on_gpu_->start(ledger);
    if (parts_on_gpu_) parts_on_gpu_->start(ledger);
  }
  int uses(UnitId unit) const { return static_cast<int>(units_[unit].size()); }
  HoldingId holding(UnitId unit, int use) const { return holdings(unit, use).front(); }
  // Where gradients are added pairwise, a use may have several buffers, one per partial sum.
  const std::vector<HoldingId>& holdings(UnitId unit, int use) const {
    return units_[unit][static_cast<std::size_t>(use)].holdings;
  }
  std::size_t bytes(UnitId unit, int use) const {
    return units_[unit][static_cast<std::size_t>(use)].elements *
           (on_gpu_ ? size_of(types_[unit]) : sizeof(float));
  }
  float* data(ParameterId parameter, int use) const;  // REQUIRES: its buffer is held
  // The buffer of the partial sum that has `below` others below it. One without a holding is in the memory
  // for gradients that wait, from element waiting_from on.
  float* sum(UnitId unit, int use, std::size_t below, std::size_t waiting_from) const;
  // The offset of a parameter's gradient in a buffer of that use.
  std::size_t offset(ParameterId parameter, int use) const;
  // The type of the unit's final gradient. Sums are f32. On a GPU a gradient keeps its own type, densely
  // packed, while it is the only one of each parameter, unless it is then sent to other ranks.
  Dtype final_type(UnitId unit) const { return types_[unit]; }

  // REQUIRES, up to widen(): the unit's buffer is held.
  // Also sums squares; the parameter has a gradient from then on. The first after leave_buffer() replaces it.
  void add(Threads& threads, ParameterId parameter, ConstArray gradient);
  void read(Threads& threads, ParameterId parameter, Array out) const;  // REQUIRES: has(parameter)
  // Fill the parameter's elements with zeros, or scale them; its known squares and factor do not change.
  void fill_with_zeros(Threads& threads, ParameterId parameter);
  void scale(Threads& threads, ParameterId parameter, double factor);
  void widen(UnitId unit);  // on a GPU: converts the unit's gradients to f32
  // States that f32 sums replace the gradients.
  void becomes_wide(UnitId unit) { types_[unit] = Dtype::kF32; }

  // The calls below need no buffer.
  bool has(ParameterId parameter) const { return known_[parameter].there; }
  // States that the parameter has a gradient, with these squares, if they are known.
  void begin(ParameterId parameter, const kernels::SquareSum& squares = {}) {
    known_[parameter] = {true, squares, 1, false};
  }
  bool any(UnitId unit) const;  // whether any of its parameters has a gradient
  // States that the gradient is kept outside of its buffer (GradientParts).
  void leave_buffer(ParameterId parameter) { known_[parameter].apart = true; }
  bool is_apart(ParameterId parameter) const { return known_[parameter].apart; }
  // part = part * factor + mean, for elements of the unit that this rank updates, which belong to the
  // parameter; both arrays begin with the first of them. A part's elements are added in ascending order; its
  // squares are then this rank's squares of the parameter. On a GPU this is queued.
  void add_to_part(Threads& threads, ParameterId parameter, ElementRange elements, ConstArray mean,
                   double factor, Array part);
  void multiply(ParameterId parameter, double factor) { known_[parameter].factor *= factor; }
  double factor(ParameterId parameter) const { return known_[parameter].factor; }
  double norm(ParameterId parameter) const;
  // The terms of the norm over all parameters: the squares of each one that is not a copy, with its factor.
  // They are added in a tree over its grid, whatever units it spans.
  GradientSquares all_squares() const;
  // This rank's squares of these parameters, as bytes for the other ranks; and the squares that all ranks
  // have, combined in their order.
  std::string squares(std::span<const ParameterId> parameters) const;
  void take_squares(std::span<const ParameterId> parameters, const std::vector<std::string>& of_ranks);
  std::optional<ParameterId> not_finite(UnitId unit) const;
  std::optional<ParameterId> not_finite() const;
  // For a unit whose update follows at once, on a GPU: queues a check whether its gradients are finite, and
  // returns where the result will be (see DeviceGradients::check()). It does not check factors:
  // not_finite_factor() does.
  const std::uint32_t* check_on_gpu(UnitId unit, bool for_cpu);
  std::optional<ParameterId> not_finite_factor(UnitId unit) const;
  bool any_squares_on_gpu() const { return std::ranges::any_of(known_, &Known::squares_on_gpu); }
  // A parameter that was handed over with a gradient that is not finite. Waits if squares are still on the
  // GPU.
  std::optional<ParameterId> not_finite_of_step() const;
  void drop(ParameterId parameter);
  void drop_unit(UnitId unit);
  void drop_all();
  // The unit's gradients belong to an update from now on: has() is false, but the norm still counts them.
  void hand_over(UnitId unit);

 private:
  struct Buffer {
    std::vector<HoldingId> holdings;
    std::size_t elements = 0;
    std::vector<std::size_t> offsets;  // by parameter of the unit; kNoSuchUse where it has no such use
  };
  struct Known {
    bool there = false;
    kernels::SquareSum squares;  // of the elements, without the factor
    double factor = 1;
    bool squares_on_gpu = false;  // still to be fetched
    bool apart = false;           // see leave_buffer()
    bool in_buffer() const { return there && !apart; }
  };
  // Waits if squares are still on the GPU.
  const Known& known(ParameterId parameter) const;
  void add_on_gpu(ParameterId parameter, ConstArray gradient);
  bool any_in_buffer(UnitId unit) const;
  Array on_gpu(ParameterId parameter) const;  // the gradient, which is on the GPU

  const Layout& layout_;
  const Ranks* const ranks_;
  Pager& pager_;
  const std::optional<Twin> twin_;
  std::size_t waiting_bytes_;
  allocator::Region waiting_;
  std::vector<std::vector<Buffer>> units_;
  std::vector<Dtype> types_;          // by unit
  mutable std::vector<Known> known_;  // by parameter
  // Of whole gradients, and of this rank's parts, where these are added up. Null: the CPU computes.
  std::unique_ptr<DeviceGradients> on_gpu_, parts_on_gpu_;
};

// The squares of a parameter's elements among `elements` of its unit; `values` begins with the first of
// these. If there are none, the sum is empty, at the place where it would begin.
kernels::SquareSum squares_within(const Layout& layout, Threads& threads, ParameterId parameter,
                                  ConstArray values, ElementRange elements);

}  // namespace sluice::engine
