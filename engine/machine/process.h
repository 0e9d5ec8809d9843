#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

#include "core/system.h"

// How much memory a process holds, and may hold.
namespace sluice::engine {

// The memory that the process takes beyond what it holds before the engine begins and what the plan counts:
// stacks of threads, small objects, the system's tables.
inline constexpr std::uint64_t kReserve = std::uint64_t{8} << 20;
// The bytes that a plan counts for a process which holds `held` bytes, with its reserve, before the engine
// begins. They are not measured, which would differ by some KiB from run to run, so that a plan and the run
// that follows it count the same: they are a stated figure, or, where `held` is more (much data, other
// libraries), `held` in whole steps of 4 MiB.
std::uint64_t process_bytes(std::uint64_t held, int threads);
// The bytes that a plan counts for each event that a trace keeps.
inline constexpr std::uint64_t kTraceEventBytes = 160;

// The memory that this process may use where the user states none: nine tenths of what it holds and what is
// free. Throws Error(kInvalidArgument) where the system does not say how much is free.
std::uint64_t default_memory();

// Throws Error(kBudget) where this machine's ranks take so much memory each, as `what` says, and the limit of
// their control group (the container) is lower: the kernel would kill one of them without a message.
void check_group_limit(std::uint64_t bytes, int ranks_here, std::string_view what,
                       std::optional<std::size_t> limit = memory_state().group_limit);

// Throws Error(kBudget) where the plans of this machine's ranks take `peak` bytes each, and the machine has
// less with its swap (`most`): the kernel would kill one of them without a message.
void check_machine_memory(std::uint64_t peak, int ranks_here,
                          std::optional<std::size_t> most = memory_state().with_swap);

}  // namespace sluice::engine
