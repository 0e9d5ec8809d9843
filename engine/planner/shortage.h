#pragma once
#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "engine/plan/plan.h"
#include "engine/planner/placement.h"

// Private to the plan.
namespace sluice::engine {

// The plans of all ranks that take least memory, of some kind: this rank's, and the most that any rank needs,
// since their shards differ.
struct LeastOfRanks {
  explicit LeastOfRanks(const Plan& plan) : own(plan) { count(plan); }
  void count(const Plan& of_rank) {
    memory = std::max(memory, of_rank.peak_memory);
    disk = std::max(disk, of_rank.disk_bytes);
  }
  // Whether they are easier to come by: memory counts where it is short, and the disk otherwise.
  bool is_less(const LeastOfRanks& than, const Budget& budget) const {
    const std::uint64_t needed = std::max(memory, budget.memory),
                        than_needed = std::max(than.memory, budget.memory);
    return needed != than_needed ? needed < than_needed : disk < than.disk;
  }
  Plan own;
  std::uint64_t memory = 0, disk = 0;
};

// Why a rank has no plan.
struct Shortage {
  const Profile& profile;
  const PlanRequest& request;
  const Budget& budget;
  std::string optimizer;  // its name
  const Placement& placement;
  // All of it in memory; everything on disk that can be. Beside a GPU they are this rank's alone, with all
  // there that fits there.
  LeastOfRanks in_memory, on_disk;
};

// Formats the needed bytes as format_size(), or with all digits where they would look like the given ones.
std::string format_needed(std::uint64_t needed, std::uint64_t given);

// All of these throw Error(kBudget), which says which budget is short, by how much, and what to give: each of
// the alternatives is enough, and all ranks have a plan with it. The first one is where the CPU computes.
[[noreturn]] void refuse(const Shortage& shortage);
// Where a GPU computes, whose memory is enough. with_disk: the plan in the memory that is given, where it
// would do with a disk.
[[noreturn]] void refuse_beside_gpu(const Shortage& shortage, const std::optional<Plan>& with_disk);
// Of a GPU's memory so many bytes are needed with everything elsewhere that can be, and with everything
// there.
[[noreturn]] void refuse_device_memory(const Budget& budget, const PlanRequest& request,
                                       std::uint64_t all_elsewhere, std::uint64_t all_there);

}  // namespace sluice::engine
