#include "comm/launched_links.h"

#include "core/error.h"
#include "core/log.h"

namespace sluice::comm {
namespace {

std::unique_ptr<Mpi> begin_mpi(const MpiLauncher& launcher) {
  try {
    return load_mpi();
  } catch (const Error& error) {
    fail(error.code(), "{} has started this process as rank {} of several, which need MPI: {}", launcher.name,
         launcher.rank, error.what());
  }
}

}  // namespace

LaunchedLinks join_launched(const MpiLauncher& launcher, const Mpi::Settings& settings,
                            std::size_t ring_bytes, std::chrono::milliseconds patience) {
  LaunchedLinks made;
  made.mpi = begin_mpi(launcher);
  made.rank = made.mpi->rank();
  made.ranks = made.mpi->size();
  if (launcher.ranks != 0 && made.ranks != launcher.ranks)
    fail(ErrorCode::kInvalidArgument,
         "{} has started {} ranks, of which MPI finds {}: the launcher and the MPI library do not belong "
         "together; use the mpirun of that library, or srun --mpi=pmix",
         launcher.name, launcher.ranks, made.ranks);
  made.host = make_host_links(made.mpi->make_links(settings), ring_bytes, patience);
  if (!made.host.note.empty()) log().warn("{}; they exchange bytes through MPI", made.host.note);
  made.bytes = made.host.memory + (made.host.all_here ? 0 : mpi_links_bytes(made.ranks));
  // MPI is not needed any more: finalizing it now frees its memory, and later could wait for ranks.
  if (made.host.all_here) made.mpi.reset();
  log().debug("this is rank {} of {}, one of {} on this host", made.rank, made.ranks, made.host.ranks_here);
  return made;
}

}  // namespace sluice::comm
