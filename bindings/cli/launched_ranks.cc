#include "bindings/cli/launched_ranks.h"

#include <csignal>

#include "bindings/cli/signals.h"
#include "comm/host_links.h"
#include "comm/mpi_links.h"

namespace sluice::cli {

LaunchedRanks::LaunchedRanks(const comm::MpiLauncher& launcher, const comm::Deadlines& deadlines)
    : links_(comm::join_launched(launcher,
                                 {.asked_to_end = [] { return StopSignals::requested_by(SIGTERM); }}, kRing,
                                 deadlines.patience)) {
  communicator_.emplace(std::move(links_.host.links), deadlines.of_ranks_started_together(), ledger_,
                        links_.host.hosts);
}

LaunchedRanks::~LaunchedRanks() {
  communicator_.reset();  // its links are MPI's
}

std::uint64_t LaunchedRanks::bytes() const {
  return comm::Communicator::buffer_bytes(links_.ranks) + links_.bytes;
}

std::uint64_t LaunchedRanks::bytes(int ranks, int ranks_here) {
  return comm::Communicator::buffer_bytes(ranks) + comm::host_links_bytes(ranks_here, kRing) +
         comm::mpi_links_bytes(ranks);
}

}  // namespace sluice::cli
