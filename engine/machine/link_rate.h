#pragma once
#include <cstdint>
#include <functional>

#include "comm/communicator.h"
#include "engine/plan/rates.h"

namespace sluice::engine {

// Measures, in about a tenth of a second, how fast this rank receives what all ranks gather (of several
// hosts: how fast its host receives what the ranks of others give), and how long a gather of nothing much
// takes. Collective, with the same result on all ranks: that of the slowest. Takes memory meanwhile, which no
// ledger but one of its own counts: up to 32 MiB, and no more than `memory`, what this rank has beside what
// its process counts as. Where a rank has less than 2 MiB it takes these from the reserve of process_bytes().
// `meanwhile` is called from time to time. Throws as comm::Communicator::exchange().
Link measure_link(comm::Communicator& communicator, std::uint64_t memory,
                  const std::function<void()>& meanwhile = {});

}  // namespace sluice::engine
