#pragma once
#include <functional>

#include "comm/communicator.h"
#include "engine/plan/rates.h"

namespace sluice::engine {

// Measures, in about a tenth of a second, how fast this rank receives what all ranks gather; or, of several
// hosts, how fast its host receives what the ranks of others give; and how long a
// gather of nothing much takes. Collective, with the same result on all ranks: that of the slowest. It takes
// up to 32 MiB of memory meanwhile, which no ledger but one of its own counts. `meanwhile` is called from
// time to time. Throws as comm::Communicator::exchange().
Link measure_link(comm::Communicator& communicator, const std::function<void()>& meanwhile = {});

}  // namespace sluice::engine
