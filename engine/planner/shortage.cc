#include "engine/planner/shortage.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "core/bytes.h"
#include "core/error.h"

namespace sluice::engine {
namespace {

template <class... Arguments>
[[noreturn]] void fail_for_lack_of(std::uint64_t bytes, fmt::format_string<Arguments...> text,
                                   Arguments&&... arguments) {
  throw Error(ErrorCode::kBudget, fmt::format(text, std::forward<Arguments>(arguments)...), bytes);
}

// Rounded up, as the command line takes it.
std::string format_argument(std::uint64_t bytes) { return fmt::format("{}MiB", divide_up(bytes, kMiB)); }

std::string memory_argument(const Shortage& s, std::uint64_t bytes) {
  constexpr std::uint64_t kMore = kMiB;  // the next process may take a little more than this one
  return (s.request.flags ? "--memory " : "memory=") + format_argument(bytes + kMore);
}

std::string disk_argument(const Shortage& s, std::uint64_t bytes) {
  return (s.request.flags ? "--disk FOLDER:" : "a disk folder with ") + format_argument(bytes);
}

// Names the memory that a plan needs, and the disk where too little of it is given.
std::string both_arguments(const Shortage& s, const LeastOfRanks& least) {
  return memory_argument(s, least.memory) +
         (s.budget.disk >= least.disk ? "" : " and " + disk_argument(s, least.disk));
}

std::string asked_of(const Shortage& s) {
  return fmt::format("this model does not fit in {} of memory", format_size(s.budget.memory));
}

std::string at_a_time(std::size_t group) {
  return group == 1 ? "one micro-batch at a time" : fmt::format("{} micro-batches at a time", group);
}

// Refuses, where the plan would fit but for the memory in which the optimizer's rounds work.
void refuse_rounds(const Shortage& s) {
  const RoundsNeed& need = s.placement.rounds();
  const std::uint64_t least = s.on_disk.own.peak_memory;
  if (least - need.bytes > s.budget.memory) return;
  fail_for_lack_of(
      least - s.budget.memory,
      "{}: {} updates {} as a whole, which takes {} ({} of its values, {} of workspace), and memory is short "
      "by {}, with everything else on disk that can be. Give {}, or use an optimizer that works by "
      "elements",
      asked_of(s), s.optimizer, s.placement.largest_of_rounds(), format_size(need.bytes),
      format_size(need.scratch_bytes), format_size(need.bytes - need.scratch_bytes),
      format_size(least - s.budget.memory), both_arguments(s, s.on_disk));
}

[[noreturn]] void refuse_memory(const Shortage& s) {
  refuse_rounds(s);
  // Of a small model frames and staging may take more than all that they replace.
  const bool is_small = s.in_memory.own.peak_memory <= s.on_disk.own.peak_memory;
  const LeastOfRanks& of_ranks = is_small ? s.in_memory : s.on_disk;
  const Plan& least = of_ranks.own;
  const std::uint64_t computing = least.activation_bytes + least.workspace_bytes;
  // The lack is that of the plan that the given places allow.
  const std::uint64_t lacking = s.budget.disk > 0 ? least.peak_memory : s.in_memory.own.peak_memory;
  fail_for_lack_of(lacking - std::min(lacking, s.budget.memory),
                   "{}: memory is short by {}; with everything {}{} it needs {} ({} activations and "
                   "workspace, {} frames, staging and what stays, {} the process). Give {}{}",
                   asked_of(s), format_size(least.peak_memory - s.budget.memory),
                   is_small ? "in memory that can be (on disk it takes more)" : "on disk that can be",
                   s.profile.any_order || !s.request.trains
                       ? ""
                       : ", what saves memory recomputed, and " + at_a_time(least.group),
                   format_needed(least.peak_memory, s.budget.memory), format_size(computing),
                   format_size(least.peak_memory - computing - s.budget.base), format_size(s.budget.base),
                   both_arguments(s, of_ranks),
                   !s.request.trains ? ""
                   : s.request.flags ? ", or a smaller --batch or --seq"
                                     : ", or less that is reserved, or smaller units");
}

[[noreturn]] void refuse_asked_disk(const Shortage& s, const LeastOfRanks& least) {
  fail_for_lack_of(
      least.own.disk_bytes - std::min(least.own.disk_bytes, s.budget.disk),
      "the parts that were asked to be on disk take {}, and the disk folders have {} for them; give {}",
      format_needed(least.own.disk_bytes, s.budget.disk), format_size(s.budget.disk),
      disk_argument(s, least.disk));
}

[[noreturn]] void refuse_host_memory(const Shortage& s) {
  const bool is_disk_less = s.on_disk.own.uses_disk() && s.on_disk.memory < s.in_memory.memory;
  const LeastOfRanks& least = is_disk_less ? s.on_disk : s.in_memory;
  const bool moves = least.own.step_bytes_in + least.own.step_bytes_out > 0;
  const char* const where = is_disk_less ? "on disk" : moves ? "in memory" : "on the GPU";
  fail_for_lack_of(
      least.memory - s.budget.memory,
      "{} beside {} of device memory: it is short by {}; with everything {} that can be it needs {}. Give "
      "{}{}",
      asked_of(s), format_size(s.budget.device), format_size(least.memory - s.budget.memory), where,
      format_needed(least.memory, s.budget.memory), both_arguments(s, least),
      is_disk_less && least.disk > s.budget.disk ? ", or " + both_arguments(s, s.in_memory) : "");
}

// The parts that are asked to be in a GPU's memory; empty: none is.
std::string asked_to_be_there(const PlanRequest& request) {
  std::vector<const char*> parts;
  const auto add = [&](Part part, const char* name) {
    if (request.place(part) == allocator::Tier::kDevice) parts.push_back(name);
  };
  add(Part::kParameters, "parameters");
  add(Part::kGradient, "gradients");
  add(Part::kState, "optimizer state");
  return fmt::format("{}", fmt::join(parts, " and "));
}

}  // namespace

std::string format_needed(std::uint64_t needed, std::uint64_t given) {
  const std::string text = format_size(needed);
  return needed != given && text == format_size(given) ? fmt::format("{} B", needed) : text;
}

void refuse(const Shortage& s) {
  const Plan &in_memory = s.in_memory.own, &on_disk = s.on_disk.own;
  const std::uint64_t disk = on_disk.disk_bytes - std::min(on_disk.disk_bytes, s.budget.disk);
  if (std::min(on_disk.peak_memory, in_memory.peak_memory) > s.budget.memory) refuse_memory(s);
  if (in_memory.peak_memory <= s.budget.memory) refuse_asked_disk(s, s.in_memory);
  if (s.budget.disk == 0)
    fail_for_lack_of(in_memory.peak_memory - s.budget.memory,
                     "{}: memory is short by {} and no disk is given. Add {}, or give {}", asked_of(s),
                     format_size(in_memory.peak_memory - s.budget.memory), disk_argument(s, s.on_disk.disk),
                     memory_argument(s, s.in_memory.memory));
  fail_for_lack_of(disk, "{}: the disk's {} are short by {}. Give the disk folders {} in all, or {}",
                   asked_of(s), format_size(s.budget.disk), format_size(disk),
                   format_argument(s.on_disk.disk), memory_argument(s, s.in_memory.memory));
}

void refuse_beside_gpu(const Shortage& s, const std::optional<Plan>& with_disk) {
  if (s.in_memory.memory <= s.budget.memory) refuse_asked_disk(s, s.in_memory);
  if (!with_disk) refuse_host_memory(s);
  fail_for_lack_of(
      s.in_memory.memory - s.budget.memory,
      "what does not fit in {} of device memory fits neither in {} of memory nor in the disk's {}. Give {}, "
      "{}, or more device memory",
      format_size(s.budget.device), format_size(s.budget.memory), format_size(s.budget.disk),
      both_arguments(s, s.in_memory), disk_argument(s, with_disk->disk_bytes));
}

void refuse_device_memory(const Budget& budget, const PlanRequest& request, std::uint64_t all_elsewhere,
                          std::uint64_t all_there) {
  const std::uint64_t needed = std::min(all_elsewhere, all_there);
  const std::string asked = asked_to_be_there(request);
  fail_for_lack_of(
      needed - budget.device,
      "this model does not fit in {} of device memory: it is short by {}; with everything {} that can be{} "
      "it "
      "needs {} ({} of it for CUDA and the client). Give device_memory={}MiB, or smaller units{}",
      format_size(budget.device), format_size(needed - budget.device),
      needed == all_elsewhere ? "elsewhere" : "there",
      asked.empty() ? "" : ", and " + asked + " there, as asked,", format_needed(needed, budget.device),
      format_size(budget.device_base), divide_up(needed, kMiB),
      asked.empty() ? "" : ", or ask for another place of " + asked);
}

}  // namespace sluice::engine
