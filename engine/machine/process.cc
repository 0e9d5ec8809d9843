#include "engine/machine/process.h"

#include <cstdint>
#include <string>

#include "allocator/memory.h"
#include "core/bytes.h"
#include "core/error.h"

namespace sluice::engine {
namespace {

std::string for_each_of(std::uint64_t ranks) {
  return ranks == 1 ? "" : fmt::format(" for each of the {} ranks of this machine", ranks);
}

}  // namespace

// A tenth is left to other processes.
std::uint64_t default_memory() {
  const std::uint64_t available = allocator::available_memory_bytes();
  if (available == SIZE_MAX)
    fail(ErrorCode::kInvalidArgument,
         "this system does not say how much memory is free; state it with --memory");
  return (allocator::resident_bytes() + available) / 10 * 9;
}

std::uint64_t process_bytes(std::uint64_t held, int threads) {
  constexpr std::uint64_t kProcess = 40 * kMiB, kThread = 64 * kKiB, kStep = 4 * kMiB;
  const std::uint64_t stated = kProcess + static_cast<std::uint64_t>(threads) * kThread;
  return held <= stated ? stated : round_up(held, kStep);
}

void check_group_limit(std::uint64_t bytes, int ranks_here, std::string_view what,
                       std::optional<std::size_t> limit) {
  const auto ranks = static_cast<std::uint64_t>(ranks_here);
  if (!limit || bytes <= *limit / ranks) return;
  fail(ErrorCode::kBudget,
       "{} {}{}, and the control group (the container) of this process may have {}, beyond which the kernel "
       "ends processes: state at most {}, or raise the limit",
       what, format_size(bytes), for_each_of(ranks), format_size(*limit), format_size(*limit / ranks));
}

void check_machine_memory(std::uint64_t peak, int ranks_here, std::optional<std::size_t> most) {
  const auto ranks = static_cast<std::uint64_t>(ranks_here);
  if (!most || peak <= *most / ranks) return;
  fail(ErrorCode::kBudget,
       "the plan takes {} of memory{}, and this machine has {} with its swap, beyond which the kernel ends "
       "processes: state at most {}",
       format_size(peak), for_each_of(ranks), format_size(*most), format_size(*most / ranks));
}

}  // namespace sluice::engine
