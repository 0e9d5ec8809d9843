#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/bytes.h"
#include "engine/layout.h"
#include "engine/plan/frames.h"
#include "engine/plan/plan.h"
#include "engine/plan/profile.h"
#include "engine/plan/walk.h"
#include "engine/step/batches.h"
#include "engine/store/state_format.h"

namespace sluice::engine {

// What units take where their parts live, frames and staging left out.
struct Held {
  // In memory: in huge pages of their own, and in those that are shared with others of the same part.
  std::array<std::uint64_t, kParts> own = {}, shared = {};
  std::array<std::uint64_t, kParts> disk = {};
  std::uint64_t metadata = 0;  // in memory, of what is on disk
  std::size_t streamed = 0;    // units of which something passes through staging
  std::uint64_t memory(Part part) const {
    return own[index(part)] + round_up(shared[index(part)], kHugePage);
  }
};

// Sizes of everything that can be placed, and what each placement costs: the arithmetic under make_plan.
class Placement {
 public:
  Placement(const Profile& profile, const optim::Optimizer& optimizer, const PlanRequest& request);

  const Layout& layout() const { return layout_; }
  const StateFormat& format() const { return format_; }
  double element_bytes() const;  // of master and state of a trainable parameter, on average
  const RoundsNeed& rounds() const { return rounds_; }      // of memory, while an update is computed
  std::string largest_of_rounds() const;                    // name and shape
  std::size_t whole_bytes() const { return whole_bytes_; }  // that state takes in memory wherever it lives

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
  Traffic state_traffic(UnitId unit) const { return units_[unit].state_traffic; }

  // What the accesses of a window need together.
  FrameNeeds frame_needs(const Lookahead& lookahead) const;
  Held held(const std::vector<UnitPlan>& units) const;
  void make_resident(UnitId unit, Part part, UnitPlan& plan, Held& held) const;
  // Whether values or state pass through f32 memory that is neither the parameter nor a master.
  bool needs_scratch() const;

  std::size_t activation_bytes(const std::vector<UnitPlan>& units, std::size_t group) const;
  std::size_t workspace_bytes(const std::vector<UnitPlan>& units) const;
  // Where a unit is in the schedule of one group.
  struct Positions {
    std::vector<std::size_t> parameters, gradient;
    std::size_t first = 0, last = 0;
    std::size_t fetches = 0;  // of its parameters, for one group
    std::size_t writes = 0;   // accesses that write its gradient
  };
  // Seconds of each unit at a machine's rates.
  struct Times {
    double forward = 0, update = 0;
    double final = 0;              // in which its gradient is made final
    std::vector<double> backward;  // by choice
  };
  std::vector<Times> times(const MachineRates& rates) const;
  // A whole step, access by access.
  std::vector<Visit> visits(const std::vector<UnitPlan>& units, std::size_t group,
                            const std::vector<Times>& times) const;
  // The smallest chunk whose update is long enough for this machine's memory, of the unit that moves least.
  std::size_t chunk_for(const MachineRates& rates) const;

 private:
  const Profile& profile_;
  bool clip_;
  Layout layout_;
  std::vector<int> uses_;  // gradient buffers of each unit
  bool updated(UnitId unit) const { return uses_[unit] > 0; }
  // Whether its gradient, where it has one, waits for others once it is final.
  bool waits(UnitId unit) const { return clip_ || together_[unit]; }
  // That its update streams something.
  bool streams(UnitId unit, const UnitPlan& plan) const {
    return !plan.resident(Part::kState) || (!plan.resident(Part::kGradient) && waits(unit));
  }
  double update_bytes(ParameterId parameter, int rounds) const;  // for each element
  void add_computing(UnitId unit, const UnitPlan& plan, std::size_t group, const Times& times,
                     std::vector<Visit>& visits) const;
  double update_seconds(UnitId unit, const MachineRates& rates) const;
  // body(parameter, update_bytes()) for those that are updated.
  template <class Body>
  void for_each_updated(UnitId unit, const Body& body) const;
  // What of a part is in memory, on disk, and in memory for what is there.
  struct Sizes {
    std::size_t own = 0, shared = 0, disk = 0, metadata = 0;
  };
  struct Unit {
    std::array<Sizes, kParts> sizes;
    Traffic state_traffic;
    std::uint64_t elements_read = 0;                        // of the gradient, by all passes of its update
    std::uint64_t last_use_bytes = 0, other_use_bytes = 0;  // of its gradient
    Positions at;
  };
  void find_positions();
  void measure(UnitId unit);

  StateFormat format_;
  std::vector<std::vector<Batch>> batches_;  // by unit
  std::vector<bool> together_;               // likewise: it is updated with its siblings
  bool rounds_read_values_ = false;          // of such units
  std::size_t whole_bytes_;
  RoundsNeed rounds_;
  std::vector<double> product_flops_;  // of each unit's update
  std::vector<Unit> units_;
};

}  // namespace sluice::engine
