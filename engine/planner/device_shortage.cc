#include "engine/planner/device_shortage.h"

#include <algorithm>

#include "core/bytes.h"
#include "core/error.h"
#include "engine/planner/shortage.h"

namespace sluice::engine {
namespace {

std::string memory_argument(const Plan& plan) {
  constexpr std::uint64_t kMore = kMiB;  // the next process may take a little more than this one
  return fmt::format("memory={}MiB", divide_up(plan.peak_memory + kMore, kMiB));
}
std::string disk_argument(const Plan& plan) {
  return fmt::format("a disk folder with {}MiB", divide_up(plan.disk_bytes, kMiB));
}
std::string and_disk(const Plan& plan, const Budget& budget) {
  return plan.disk_bytes <= budget.disk ? "" : " and " + disk_argument(plan);
}

[[noreturn]] void refuse_memory(const ShortageBesideGpu& s) {
  const bool is_disk_less = s.on_disk.uses_disk() && s.on_disk.peak_memory < s.in_memory.peak_memory;
  const Plan& least = is_disk_less ? s.on_disk : s.in_memory;
  const bool moves = least.step_bytes_in + least.step_bytes_out > 0;
  const char* const where = is_disk_less ? "on disk" : moves ? "in memory" : "on the GPU";
  fail(ErrorCode::kBudget,
       "this model does not fit in {} of memory beside {} of device memory: it is short by {}; with "
       "everything {} that can be it needs {}. Give {}{}{}",
       format_size(s.budget.memory), format_size(s.budget.device),
       format_size(least.peak_memory - s.budget.memory), where,
       format_needed(least.peak_memory, s.budget.memory), memory_argument(least), and_disk(least, s.budget),
       is_disk_less && least.disk_bytes > s.budget.disk
           ? ", or " + memory_argument(s.in_memory) + and_disk(s.in_memory, s.budget)
           : "");
}

}  // namespace

void refuse_device_memory(const Budget& budget, std::uint64_t all_elsewhere, std::uint64_t all_there) {
  const std::uint64_t needed = std::min(all_elsewhere, all_there);
  fail(ErrorCode::kBudget,
       "this model does not fit in {} of device memory: it is short by {}; with everything {} that can be it "
       "needs {} ({} of it for CUDA and the client). Give device_memory={}MiB, or smaller units",
       format_size(budget.device), format_size(needed - budget.device),
       needed == all_elsewhere ? "elsewhere" : "there", format_needed(needed, budget.device),
       format_size(budget.device_base), divide_up(needed, kMiB));
}

void refuse_beside_gpu(const ShortageBesideGpu& s) {
  if (s.in_memory.peak_memory <= s.budget.memory)
    fail(ErrorCode::kBudget,
         "the parts that were asked to be on disk take {}, and the disk folders have {} for them; give {}",
         format_needed(s.in_memory.disk_bytes, s.budget.disk), format_size(s.budget.disk),
         disk_argument(s.in_memory));
  if (!s.with_disk) refuse_memory(s);
  fail(ErrorCode::kBudget,
       "what does not fit in {} of device memory fits neither in {} of memory nor in the disk's {}. Give "
       "{}{}, {}, or more device memory",
       format_size(s.budget.device), format_size(s.budget.memory), format_size(s.budget.disk),
       memory_argument(s.in_memory), and_disk(s.in_memory, s.budget), disk_argument(*s.with_disk));
}

}  // namespace sluice::engine
