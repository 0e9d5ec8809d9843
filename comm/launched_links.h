#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/host_links.h"
#include "comm/mpi_links.h"

namespace sluice::comm {

// Links of the ranks that a launcher of MPI has started. Those of one host share memory; only others exchange
// bytes through MPI.
struct LaunchedLinks {
  std::unique_ptr<Mpi>
      mpi;  // outlives the links; null where all ranks share memory, since MPI has ended then
  HostLinks host;
  int rank = 0, ranks = 1;
  std::uint64_t bytes = 0;  // what this rank holds for them
};

// Collective. Throws Error(kNotFound) where the plug-in is missing, Error(kInvalidArgument) where MPI has
// found other ranks than the launcher has started, Error(kState) where MPI was begun before, and Error(kIo)
// where a rank does not come within `patience`.
LaunchedLinks join_launched(const MpiLauncher& launcher, const Mpi::Settings& settings,
                            std::size_t ring_bytes, std::chrono::milliseconds patience);

}  // namespace sluice::comm
