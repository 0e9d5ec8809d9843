#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "allocator/memory.h"
#include "engine/engine.h"
#include "engine/step/recorder.h"

namespace sluice::engine {

// What a client holds of a unit.
enum class Hold : std::uint8_t {
  kRead,          // its parameters
  kGradient,      // its parameters, and gradients will be added; within a step, and not of a frozen unit
  kGradientOnly,  // that gradients will be added; its parameters need not come
  // Its parameters, which the client writes where they lie. When it is released they are its values, and the
  // masters' (of those elements that were changed).
  kEdit,
};
constexpr bool with_parameters(Hold hold) { return hold != Hold::kGradientOnly; }
constexpr bool with_gradient(Hold hold) { return hold == Hold::kGradient || hold == Hold::kGradientOnly; }

// An engine whose client (a wrapped model) acquires units in whatever order it has, several at once, and
// outside of a step for reading. The order is recorded; in the next step what follows is fetched ahead by it.
// Calls of a step: begin_step; acquire, add_gradient, release as often as need be; step, or abandon_step.
// Gradients are final at step(), which takes the settings; a parameter that got none is left as it is. Where
// the plan does not clip, a unit's are final when it is not held any more, and applied then with the settings
// of begin_step(): one gradient of each parameter in a step; it is release() that throws Error(kNotFinite),
// and the unit is as it was. Where the optimizer has rounds for a parameter that spans units, these are
// updated together, as one: when the gradients of all are final. In a step each of them gets one, or none
// does; step() refuses otherwise. Parameters are at their address only while their unit is held, to be read
// only but for editing; a touch at another time, or a write, is noticed (see allocator::TouchServer). Values
// may be loaded and saved in the middle of a step, but for loading a unit that is held.
class AnyOrderEngine final : public Engine {
 public:
  // As Engine's.
  AnyOrderEngine(const Profile& profile, const Plan& plan, const optim::Optimizer& optimizer,
                 const Resources& resources);

  // Questions, as Engine's.
  std::vector<Hold> holds(UnitId unit) const;  // in the order of acquiring, without what a touch brought in
  std::vector<UnitId> held_units() const;      // likewise; each once
  bool has_gradient(ParameterId parameter) const;  // which waits for its update, or was kept
  bool left() const { return left_; }
  std::optional<UnitId> unit_at(const std::byte* address) const;  // whose address it is

  void begin_step(const StepSettings& settings);
  // Held until it is released as often as it was acquired.
  void acquire(UnitId unit, Hold hold);
  void release(UnitId unit);  // what was acquired last of it
  // Adds to what the step has of this parameter. REQUIRES: its unit is held with its gradient.
  void add_gradient(ParameterId parameter, ConstArray gradient);
  // Throws Error(kNotFinite) naming a parameter whose gradient is not finite, or the norm: no parameter was
  // changed then, and the step is over.
  StepResult step(const StepSettings& settings);
  // The step is over without an update. Its gradients are dropped, and what is held is released.
  void abandon_step();

  // At any time, of a parameter that has a gradient; Error(kState) otherwise. They bring in no more than they
  // need: the norm (infinite where an element is not finite) is known, the factor is applied when the
  // gradient is used. A factor that comes while an update is pending is for later uses.
  void read_gradient(ParameterId parameter, Array out);  // out: [elements]; waits for a pending update
  void multiply_gradient(ParameterId parameter, double factor);
  double gradient_norm(ParameterId parameter);
  void drop_gradient(ParameterId parameter);  // also where there is none

  // Touches of absent parameters go to the server, which calls touch(): it brings the unit in, to be read, or
  // written, too, and holds it until release_touched(); for its room those make way that were touched before,
  // the oldest first.
  void serve_touches(allocator::TouchServer& server) const;
  void touch(UnitId unit, bool write);
  void release_touched();

  // The end. Each unit's addresses outlive the engine, in the hands of `take`: with its values under them,
  // after its pending update, in ordinary memory, for which the engine's own is given back on the way; or
  // without values, which works with an engine that has failed, too. Afterwards only the destructor and
  // questions may be called. An error on the way leaves those units without values that have not left.
  // REQUIRES: nothing is held where there are to be values.
  void leave(bool with_values, const std::function<void(UnitId, allocator::FormerHome)>& take);
  // By how much the process grows at most while all leave with their values (negative: it shrinks).
  std::int64_t growth_of_leaving() const;

  // Between steps: the same units by another plan, where they are by this one and how much they take. Values,
  // state and addresses stay; what has another place is moved, and no more memory is held meanwhile than by
  // one of the two. Error(kBudget), with nothing changed, where the disk has no room for what leaves memory;
  // Error(kState), likewise, where a unit is held, has no values, or has a gradient.
  // REQUIRES: made for the same profile, optimizer, chunks and clipping.
  void replan(const Plan& plan);

 private:
  struct Held {
    UnitId unit;
    Hold hold;
    bool touched;  // it was brought in for a touch
  };
  using HeldIterator = std::vector<Held>::const_iterator;
  void check_load(UnitId unit) const override;
  void check_save(UnitId /*unit*/) const override {}
  void check_acquire(UnitId unit, Hold hold) const;
  void check_held_units(UnitId wanted) const;
  void check_replan(const Plan& next) const;
  void require_none_held(const char* what) const;
  void require_gradient(ParameterId parameter) const;
  void require_all_or_none() const;  // of the gradients of what is updated together
  bool is_held(UnitId unit) const;
  bool is_held_for_gradients(UnitId unit) const;
  HeldIterator oldest_touched() const;

  void take(const Held& wanted);
  void let_go(HeldIterator at);
  void take_edited(UnitId unit);
  void release_gradient(UnitId unit);
  void discard_unless_needed(UnitId unit);
  void drop_all_gradients();
  bool have_final_gradients(UnitRange units) const;
  void update_at_once(UnitRange units);  // their gradients are final
  void await_update(UnitId unit, bool from_record);
  [[noreturn]] void refuse_at_once(UnitRange units, ParameterId bad);
  StepResult update_all(const std::vector<Access>& accesses, const StepSettings& settings);
  std::vector<UnitRange> units_to_update(const std::vector<Access>& accesses) const;

  std::size_t most_held_;
  std::vector<Held> held_;  // in the order of acquiring
  Recorder recorder_;
  std::vector<bool> updated_;  // by parameter: at once, in this step
  std::vector<bool> changed_;  // by unit: gradients were added since it was held for them
  struct Addressed {
    const std::byte* begin;
    UnitId unit;
  };
  std::vector<Addressed> by_address_;  // the units' parameters
  bool left_ = false;
};

}  // namespace sluice::engine
