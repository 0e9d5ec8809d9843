#pragma once
#include <cstdint>
#include <functional>

#include "comm/communicator.h"
#include "engine/plan/rates.h"

namespace sluice::engine {

// Measures, in about a tenth of a second, how fast this rank receives in an all-gather (with several hosts:
// how fast its host receives from the others), and how long an all-gather of almost nothing takes.
// Collective, with the same result on all ranks: that of the slowest. Meanwhile takes memory that only a
// ledger of its own counts: up to 32 MiB, and at most `memory`, what this rank has beside what its process
// counts as. A rank with less than 2 MiB takes these from the reserve of process_bytes(). `meanwhile` is
// called from time to time. Throws as comm::Communicator::exchange().
Link measure_link(comm::Communicator& communicator, std::uint64_t memory,
                  const std::function<void()>& meanwhile = {});

}  // namespace sluice::engine
