#pragma once
#include <cstdint>
#include <optional>

#include "engine/plan/plan.h"

// Private to the plan.
namespace sluice::engine {

// Why there is no plan, although the GPU's memory would be enough.
struct ShortageBesideGpu {
  const Budget& budget;
  // The plans that take least host memory, with all of it there that may be, and with everything on disk that
  // can be.
  const Plan in_memory, on_disk;
  std::optional<Plan> with_disk;  // in the memory that is given, where it would do with a disk
};

// Both throw Error(kBudget), which says which budget is short, by how much, and what to give: each of the
// alternatives is enough. The first one is for a GPU's memory, of which so many bytes are needed with
// everything elsewhere that can be, and with everything there.
[[noreturn]] void refuse_device_memory(const Budget& budget, std::uint64_t all_elsewhere,
                                       std::uint64_t all_there);
[[noreturn]] void refuse_beside_gpu(const ShortageBesideGpu& shortage);

}  // namespace sluice::engine
