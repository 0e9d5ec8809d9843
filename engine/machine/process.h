#pragma once
#include <cstdint>

// What a process holds, and may hold.
namespace sluice::engine {

// What the process takes beyond what it holds before the engine begins and what the plan places: stacks of
// threads, small objects, the system's tables.
inline constexpr std::uint64_t kReserve = std::uint64_t{8} << 20;
// What the process counts as in a plan, where it holds `held` bytes with its reserve before the engine
// begins: no measurement, which differs by some KiB from run to run, but a stated figure that is more; where
// it is not (much data, other libraries), `held` in whole steps of 4 MiB. So a plan and the run that follows
// it count the same.
std::uint64_t process_bytes(std::uint64_t held, int threads);
// What an event that a trace keeps counts as.
inline constexpr std::uint64_t kTraceEventBytes = 160;

// What this process may use where nobody states it. Throws Error(kInvalidArgument) where the system does not
// say how much is free.
std::uint64_t default_memory();

}  // namespace sluice::engine
