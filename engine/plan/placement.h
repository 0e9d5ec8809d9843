#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/layout.h"
#include "engine/plan/plan.h"
#include "engine/plan/profile.h"
#include "engine/plan/walk.h"
#include "engine/step/batches.h"
#include "engine/store/state_format.h"

namespace sluice::engine {

// How far ahead frames reach: accesses fetched ahead, and whether room is left for what is being written
// behind.
struct Lookahead {
  std::size_t prefetch = 2;
  bool slack = true;
  std::size_t ahead() const { return prefetch + (slack ? 1 : 0); }
};

// Sizes of everything that can be placed, and what each placement costs: the arithmetic under make_plan.
class Placement {
 public:
  Placement(const Profile& profile, const optim::Optimizer& optimizer, const PlanRequest& request);

  const Layout& layout() const { return layout_; }
  const StateFormat& format() const { return format_; }
  double element_bytes() const;  // of master and state of a trainable parameter, on average
  const RoundsNeed& rounds() const { return rounds_; }  // of memory, while an update is computed
  std::string largest_of_rounds() const;                // name and shape

  std::size_t parameter_bytes(UnitId unit) const;
  std::size_t gradient_bytes(UnitId unit) const;  // all uses
  std::size_t state_bytes(UnitId unit) const;
  // Whether its gradient waits: for the norm of all, for its siblings' (an update that they have together),
  // for other uses, or for other groups of micro-batches.
  bool stores_gradient(UnitId unit, std::size_t groups) const;

  // Bytes of the disk tier that one step moves for what is not resident.
  struct Traffic {
    std::uint64_t read = 0, written = 0;
    std::uint64_t total() const { return read + written; }
  };
  Traffic parameter_traffic(UnitId unit, std::size_t groups) const;
  Traffic gradient_traffic(UnitId unit, std::size_t groups) const;
  // Of it what is kept while other uses and groups add to it.
  Traffic kept_gradient_traffic(UnitId unit, std::size_t groups) const;
  Traffic state_traffic(UnitId unit) const;

  // Frames that the accesses of a window need together, given what is resident.
  std::size_t extents(const std::vector<UnitPlan>& units, const Lookahead& lookahead) const;
  bool needs_staging(const std::vector<UnitPlan>& units) const;
  // Whether values or state pass through f32 memory that is neither the parameter nor a master.
  bool needs_scratch() const;

  std::size_t activation_bytes(const std::vector<UnitPlan>& units, std::size_t group) const;
  std::size_t workspace_bytes(const std::vector<UnitPlan>& units) const;
  // A whole step, access by access.
  std::vector<Visit> visits(const std::vector<UnitPlan>& units, std::size_t group,
                            const MachineRates& rates) const;
  // Where a unit is in the schedule of one group.
  struct Positions {
    std::vector<std::size_t> parameters, gradient;
    std::size_t first = 0, last = 0;
  };
  // What an update moves of memory for each element, of the unit that moves least; infinite where none is
  // updated.
  double least_update_bytes() const;

  // Sums over what is resident, each rounded as it is taken.
  std::array<std::uint64_t, allocator::kPurposes> resident_bytes(const std::vector<UnitPlan>& units) const;
  std::array<std::uint64_t, allocator::kPurposes> disk_bytes(const std::vector<UnitPlan>& units) const;
  std::size_t metadata_bytes(const std::vector<UnitPlan>& units) const;  // in memory, of what is on disk

 private:
  // body(purpose, bytes, bytes of a block)
  template <class Body>
  void for_each_record(const std::vector<UnitPlan>& units, const Body& body) const;
  std::array<std::size_t, 3> extents_of(const Access& access, const UnitPlan& unit) const;
  std::size_t extents_in_order(const std::vector<UnitPlan>& units, std::size_t window) const;
  std::size_t extents_of_passes(const std::vector<UnitPlan>& units) const;
  std::size_t extents_in_any_order(const std::vector<UnitPlan>& units, std::size_t window) const;

  const Profile& profile_;
  bool clip_;
  Layout layout_;
  std::vector<int> uses_;  // gradient buffers of each unit
  bool updated(UnitId unit) const { return uses_[unit] > 0; }
  // Whether its gradient, where it has one, waits for others once it is final.
  bool waits(UnitId unit) const { return clip_ || together_[unit]; }
  double update_bytes(ParameterId parameter, int rounds) const;  // for each element
  double seconds(const Work& work, const MachineRates& rates) const;
  double update_seconds(UnitId unit, const MachineRates& rates) const;
  void add_computing(UnitId unit, const UnitPlan& plan, std::size_t group, const MachineRates& rates,
                     const Positions& own, std::vector<Visit>& visits) const;
  // body(parameter, update_bytes()) for those that are updated.
  template <class Body>
  void for_each_updated(UnitId unit, const Body& body) const;

  StateFormat format_;
  std::vector<std::vector<Batch>> batches_;  // by unit
  std::vector<bool> together_;               // likewise: it is updated with its siblings
  bool rounds_read_values_ = false;          // of such units
  std::size_t whole_bytes_;
  RoundsNeed rounds_;
  std::vector<double> product_flops_;  // of each unit's update
};

}  // namespace sluice::engine
