#pragma once
#include <cstdint>
#include <utility>
#include <vector>

#include "engine/planner/inputs.h"
#include "engine/planner/placement.h"

// Private to the plan.
namespace sluice::engine {

// One slot of an update's staging comes in, one is updated and one goes out.
inline constexpr std::size_t kLeastSlots = 3;

// Where a GPU computes, gains are alike of which one is at least this part of the other, and so are times.
inline constexpr double kAlike = 0.98;

// One way to run a step, apart from where everything is.
struct Shape {
  std::size_t group = 1;
  std::size_t level = 0;  // of recomputation
  Lookahead lookahead;
  std::size_t ahead = 0;  // the index of `lookahead` in Tiers::lookaheads()
  std::size_t slots = kLeastSlots;
  std::size_t host_slots = 0;  // beside a GPU
  bool fewest() const { return slots == kLeastSlots; }
};

inline bool fits(const Plan& plan, const Budget& budget) {
  return plan.device_bytes <= budget.device && plan.peak_memory <= budget.memory &&
         plan.disk_bytes <= budget.disk;
}

// Puts the parts of units on tiers, and knows what that takes on each. The nearest tier is the one that is
// computed on, a GPU's memory or the host's; the farthest is the disk.
class Tiers {
 public:
  using Tier = allocator::Tier;
  explicit Tiers(const PlanInputs& in);

  const Placement& placement() const { return placement_; }
  // From the one that takes most memory to the one that takes least.
  const std::vector<Lookahead>& lookaheads() const { return lookaheads_; }

  // Where units are, by the tiers that update them, and what that takes, before a shape is chosen.
  struct Placed {
    std::vector<UnitPlan> units;
    Footprint footprint;
    std::vector<Frames> frames;  // by look-ahead
  };
  // All that is not asked to be elsewhere is on the tier `rest`, or where it is used, if it is too small to
  // be worth moving. groups: how many of them a step has.
  Placed place_all(Tier rest, std::size_t groups, const std::vector<Tier>& updated_on) const;
  Placed placed(std::vector<UnitPlan> units) const;

  // A part of a unit that may come to a nearer tier.
  struct Item {
    UnitId unit;
    Part part;
    // For each byte of memory, the bytes of the disk's traffic that are saved; beside a GPU, the seconds of
    // copies and, with_disk, of the disk.
    double gain;
  };
  // The items with the most gain come first.
  std::vector<Item> items(const std::vector<UnitPlan>& units, std::size_t groups, bool with_disk) const;

  // All ways to run a step with these levels and slots: of the processor that computes, and of the CPU beside
  // a GPU. The last one takes least memory.
  using Slots = std::pair<std::size_t, std::size_t>;
  std::vector<Shape> shapes(std::size_t group, const std::vector<std::size_t>& levels,
                            const std::vector<Slots>& slots) const;
  Plan describe(const Shape& shape, const Placed& placed) const;
  // Brings items to that tier while they fit in its memory, the first ones first. The plan has the units of
  // `placed`. parameters_first: parameters that leave frames without use are brought in any case, since it
  // may fit only when the last of them do.
  void fill(Plan& plan, const Shape& shape, const Placed& placed, const std::vector<Item>& items, Tier to,
            bool parameters_first = false) const;
  // Counts what the plan takes, which has these frames.
  void count(Plan& plan, const Shape& shape, const Footprint& footprint, std::size_t extents) const;

 private:
  using Bytes = decltype(Plan::bytes);
  bool on_gpu() const { return in_.request.compute == Tier::kDevice; }
  Bytes fixed_bytes() const;
  Bytes bytes(const Plan& plan, const Shape& shape, const Footprint& footprint, std::size_t extents) const;
  UnitPlan place(UnitId unit, Tier rest, std::size_t groups, Tier updated_on) const;
  bool is_fixed(const UnitPlan& plan, Part part) const;
  std::size_t slots(const Shape& shape, const Footprint& footprint) const;
  std::size_t most_pieces() const;
  std::size_t pieces(const Shape& shape, const Footprint& footprint) const;
  void add_pieces(Plan& plan) const;
  static std::size_t host_slots(const Shape& shape, const Footprint& footprint) {
    return footprint.cpu_streamed > 0 ? shape.host_slots : 0;
  }

  const PlanInputs in_;
  Placement placement_;
  std::vector<Lookahead> lookaheads_;
  std::vector<FrameNeeds> needs_;  // by look-ahead
  bool needs_scratch_;
  double element_bytes_;
  std::array<std::size_t, 2> slot_bytes_ = {};       // of a staging slot without parameters, and with them
  std::array<std::size_t, 2> host_slot_bytes_ = {};  // of one beside a GPU, without the disk, and with it
  Bytes fixed_;                                      // bytes that every plan takes
};

}  // namespace sluice::engine
