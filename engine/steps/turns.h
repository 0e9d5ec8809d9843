#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "engine/layout/layout.h"

// Private to this room.
namespace sluice::engine {

// The order in which all ranks sum units, and the units whose turns are still to come in a step. As in
// torch's DistributedDataParallel it is the order in which rank 0 came to the units in the last step, of the
// units that any rank came to; at first it is the reverse of their declaration. Each rank has the same turns,
// since they follow from what all of them have reported. Thread rule: one thread.
class Turns {
 public:
  explicit Turns(const Layout& layout);

  // This rank comes to a unit, again or for the first time in the step.
  void note(UnitId unit);
  bool has_come(UnitId unit) const { return came_[unit] > 0; }
  void forget(UnitId unit) { came_[unit] = 0; }  // its gradient was dropped
  // By unit: its number in the order in which this rank came to the units; 0: it did not.
  const std::vector<std::uint32_t>& came() const { return came_; }
  void forget_all();

  // Puts units into the order in which rank 0 came to them, or into its reverse. Units to which it did not
  // come keep their places.
  void follow(const std::vector<std::uint32_t>& of_first, bool reversed = false);
  // From the next step on a unit has a turn if any rank came to it now, or, unless `anew`, in an earlier
  // step; at first all units have one that are trained.
  void expect(const std::vector<bool>& came, bool anew);
  bool has_learned() const { return has_learned_; }  // whether expect() was called

  void begin();  // a step: every unit that has a turn is to come
  void end() { ahead_.clear(); }
  std::optional<UnitId> next() const { return ahead_.empty() ? std::nullopt : std::optional(ahead_.back()); }
  void pass() { ahead_.pop_back(); }  // REQUIRES: next()
  // Gives it the turn of its place, and turns to all units before it that have had none in this step: another
  // rank may come to them first. The next turn, if it has had one.
  void insert(UnitId unit);
  bool is_ahead(UnitId unit) const { return std::ranges::count(ahead_, unit) > 0; }
  // All units: first those that have a turn.
  std::vector<UnitId> all() const;

 private:
  std::vector<UnitId> order_;
  std::vector<bool> trained_, expected_;  // by unit; expected_: whether it has a turn in each step
  std::vector<bool> had_;  // by unit: whether it has had a turn in this step, or is to have one
  std::vector<std::uint32_t> came_;
  std::uint32_t count_ = 0;    // of units that this rank came to
  std::vector<UnitId> ahead_;  // the last one is next
  bool has_learned_ = false;
};

}  // namespace sluice::engine
