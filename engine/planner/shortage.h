#pragma once
#include <algorithm>
#include <cstdint>
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
  LeastOfRanks in_memory, on_disk;  // all of it in memory; everything on disk that can be
};

// What is needed, as format_size() has it, or with all digits where that would look like what is given.
std::string format_needed(std::uint64_t needed, std::uint64_t given);

// Throws Error(kBudget), which says which budget is short, by how much, and the cheapest change with which
// all ranks have a plan.
[[noreturn]] void refuse(const Shortage& shortage);

}  // namespace sluice::engine
