#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

#include "core/system.h"

// How much memory a process holds, and may hold.
namespace sluice::engine {

// What the process takes beyond what it holds before the engine begins and what the plan has: stacks of
// threads, small objects, the system's tables.
inline constexpr std::uint64_t kReserve = std::uint64_t{8} << 20;
// What a process counts as in a plan, where it holds `held` bytes, with its reserve, before the engine
// begins. It is no measurement, which would differ by some KiB from run to run, so that a plan and the run
// that follows it count the same: it is a stated figure, or, where `held` is more (much data, other
// libraries), `held` in whole steps of 4 MiB.
std::uint64_t process_bytes(std::uint64_t held, int threads);
// What a plan counts for each event that a trace keeps.
inline constexpr std::uint64_t kTraceEventBytes = 160;

// The memory that this process may use where the user states none: nine tenths of what it holds and what is
// free. Throws Error(kInvalidArgument) where the system does not say how much is free.
std::uint64_t default_memory();

// Throws Error(kBudget) where this machine's ranks take so much memory each, as `what` says, and their
// control group (the container) may not have it: the kernel would end one of them without a word.
void check_group_limit(std::uint64_t bytes, int ranks_here, std::string_view what,
                       std::optional<std::size_t> limit = memory_state().group_limit);

}  // namespace sluice::engine
