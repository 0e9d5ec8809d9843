#pragma once
#include <algorithm>
#include <cstdint>
#include <string>

#include "engine/plan/placement.h"
#include "engine/plan/plan.h"

// Private to the plan.
namespace sluice::engine {

// What the plans that take least need: with all of it in memory, and with everything on disk that can be.
struct Least {
  Plan in_memory, on_disk;
};

// Why a rank has no plan.
struct Shortage {
  const Profile& profile;
  const PlanRequest& request;
  const Budget& budget;
  std::string optimizer;  // its name
  const Placement& placement;
  Least least;
  // The most that any of the ranks needs for such plans: their shards differ. `disk` is beside
  // memory_on_disk.
  std::uint64_t memory = 0, memory_on_disk = 0, disk = 0;
  void count(const Least& of_rank) {
    memory = std::max(memory, of_rank.in_memory.peak_memory);
    memory_on_disk = std::max(memory_on_disk, of_rank.on_disk.peak_memory);
    disk = std::max(disk, of_rank.on_disk.disk_bytes);
  }
};

// Throws Error(kBudget), which says which budget is short, by how much, and the cheapest change with which
// all ranks have a plan.
[[noreturn]] void refuse(const Shortage& shortage);

}  // namespace sluice::engine
