#include "bindings/cli/launched_ranks.h"

#include <csignal>

#include "bindings/cli/signals.h"
#include "core/error.h"
#include "core/log.h"

namespace sluice::cli {

LaunchedRanks::LaunchedRanks(const comm::MpiLauncher& launcher, const comm::Deadlines& deadlines) {
  try {
    mpi_ = comm::load_mpi();
  } catch (const Error& error) {
    fail(error.code(), "{} has started this process as rank {} of several, which need MPI: {}", launcher.name,
         launcher.rank, error.what());
  }
  if (launcher.ranks != 0 && mpi_->size() != launcher.ranks)
    fail(ErrorCode::kInvalidArgument,
         "{} has started {} ranks, of which MPI finds {}: the launcher and the MPI library do not belong "
         "together; "
         "use the mpirun of that library, or srun --mpi=pmix",
         launcher.name, launcher.ranks, mpi_->size());
  const int size = mpi_->size(), rank = mpi_->rank();
  auto made = comm::make_host_links(
      mpi_->make_links({.asked_to_end = [] { return StopSignals::requested_by(SIGTERM); }}), kRing,
      deadlines.patience);
  if (!made.note.empty()) log().warn("{}; they exchange bytes through MPI", made.note);
  bytes_ = comm::Communicator::buffer_bytes(size) + made.memory +
           (made.all_here ? 0 : comm::mpi_links_bytes(size));
  ranks_here_ = made.ranks_here;
  share_of_cpus_ = made.share_of_cpus;
  // Nothing more will be asked of MPI: it needs no memory then, and cannot wait for ranks at the end.
  if (made.all_here) mpi_.reset();
  log().debug("this is rank {} of {}, one of {} on this host", rank, size, ranks_here_);
  communicator_.emplace(std::move(made.links), deadlines, ledger_);
}

LaunchedRanks::~LaunchedRanks() {
  communicator_.reset();  // its links are MPI's
}

}  // namespace sluice::cli
