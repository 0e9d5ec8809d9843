#include "bindings/cli/launched_ranks.h"

#include <csignal>

#include "bindings/cli/signals.h"
#include "comm/host_links.h"
#include "comm/mpi_links.h"
#include "core/bytes.h"

namespace sluice::cli {
namespace {

// Memory of MPI's library itself between hosts: 8 to 12 MiB were measured for Open MPI.
constexpr std::uint64_t kLibrary = 12 * kMiB;

std::uint64_t bytes_between_hosts(int ranks) { return comm::mpi_links_bytes(ranks) + kLibrary; }

}  // namespace

LaunchedRanks::LaunchedRanks(const comm::MpiLauncher& launcher, const comm::Deadlines& deadlines)
    : links_(comm::join_launched(launcher,
                                 {.asked_to_end = [] { return StopSignals::requested_by(SIGTERM); }}, kRing,
                                 deadlines.patience)) {
  communicator_.emplace(std::move(links_.host.links), deadlines.of_ranks_started_together(), ledger_,
                        links_.host.hosts);
}

LaunchedRanks::~LaunchedRanks() {
  communicator_.reset();  // before MPI, whose links it uses
}

std::uint64_t LaunchedRanks::bytes() const {
  return comm::Communicator::buffer_bytes(links_.ranks) + links_.host.memory + bytes_in_use();
}

std::uint64_t LaunchedRanks::bytes_in_use() const {
  return links_.host.all_here ? 0 : bytes_between_hosts(links_.ranks);
}

std::uint64_t LaunchedRanks::bytes(int ranks, int ranks_here) {
  return comm::Communicator::buffer_bytes(ranks) + comm::host_links_bytes(ranks_here, kRing) +
         bytes_between_hosts(ranks);
}

}  // namespace sluice::cli
