#pragma once
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "core/json.h"
#include "engine/plan/profile.h"
#include "engine/plan/rates.h"
#include "engine/plan/walk.h"
#include "engine/tier.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// What memory there is.
struct Budget {
  std::uint64_t memory = 0;  // for the whole process
  std::uint64_t disk = 0;    // for swap; 0: no disk tier
  std::uint64_t base = 0;    // what the process holds before the engine takes anything, with its reserve
};

// What of a unit has a place of its own.
enum class Part : std::uint8_t { kParameters, kGradient, kState };
inline constexpr std::size_t kParts = 3;
constexpr std::size_t index(Part part) { return static_cast<std::size_t>(part); }

// A user's words for a tier: "memory" is the compute device's. Throws Error(kInvalidArgument) for others.
allocator::Tier tier_of_place(std::string_view place);
std::string_view place_of(allocator::Tier tier);

// What the user fixes; the rest is chosen.
struct PlanRequest {
  // Updates wait until all gradients are known: for their norm, or (dynamic loss scaling) for whether all are
  // finite.
  bool clip = true;
  std::optional<std::string> recompute;  // "none", "full", a name of a choice; nothing: chosen ("auto")
  std::optional<std::size_t> group;      // micro-batches that pass through a unit together
  std::optional<std::size_t> prefetch;   // accesses fetched ahead
  std::optional<std::size_t> chunk_elements;
  // For tests and measurements: where that part of every unit lives; nothing: chosen.
  std::array<std::optional<allocator::Tier>, kParts> places;
  const std::optional<allocator::Tier>& place(Part part) const { return places[index(part)]; }
  bool flags = false;  // a refusal names the program's flags; else the members of the C ABI's options
  bool trains = true;  // a refusal speaks of training, too
};

struct UnitPlan {
  // Where each part lives while it is not needed; of the gradient, from its backward until its update.
  std::array<allocator::Tier, kParts> tiers = {kComputeTier, kComputeTier, kComputeTier};
  // false (then it is not resident): it is under frames from its one use until its update, which follows at
  // once, and has no place of its own.
  bool gradient_stored = true;
  std::size_t choice = 0;  // of the unit's ActivationChoices

  allocator::Tier tier(Part part) const { return tiers[index(part)]; }
  void place(Part part, allocator::Tier tier) { tiers[index(part)] = tier; }
  bool resident(Part part) const { return tier(part) == kComputeTier; }
  bool operator==(const UnitPlan&) const = default;
};

// Where every byte lives. Made before the first allocation; what is not in it is not taken.
struct Plan {
  bool clip = true;
  std::vector<UnitPlan> units;
  std::size_t group = 1;         // micro-batches that pass through a unit together
  std::size_t prefetch = 1;      // accesses fetched ahead
  std::size_t extent_bytes = 0;  // of a frame
  std::size_t extents = 0;
  std::size_t chunk_elements = 0;  // of a streamed update; a multiple of kChunkGrain
  std::size_t staging_slots = 0;
  std::size_t activation_bytes = 0, workspace_bytes = 0;

  double state_bytes_per_parameter = 0;  // of the optimizer's arrays and masters

  // What is predicted.
  std::array<std::array<std::uint64_t, allocator::kPurposes>, allocator::kTiers> bytes = {};
  std::uint64_t peak_memory = 0, disk_bytes = 0;
  std::uint64_t step_bytes_read = 0, step_bytes_written = 0;  // of the disk tier
  StepTime time;
  // Who is busy for longer.
  const char* bound() const {
    return time.disk > time.compute + time.optimizer + time.transfers ? "disk" : "compute";
  }
  bool uses_disk() const { return disk_bytes > 0; }
};

// Profile x Budget -> Plan: a pure function; the fastest plan that fits by the rates given.
// Throws Error(kBudget) that says which budget is short, by how much, and the cheapest change that fits;
// Error(kInvalidArgument) for a request that the profile does not know.
Plan make_plan(const Profile& profile, const optim::Optimizer& optimizer, const Budget& budget,
               const PlanRequest& request, const MachineRates& rates);

// The table for people, and the same for programs.
std::string to_text(const Plan& plan, const Profile& profile, const Budget& budget);
Json to_json(const Plan& plan, const Profile& profile, const Budget& budget);

}  // namespace sluice::engine
