#pragma once
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/host_links.h"
#include "comm/mpi_links.h"

namespace sluice::comm {

// Links among the ranks that an MPI launcher has started. Ranks of one host share memory; only ranks of
// different hosts exchange bytes through MPI.
struct LaunchedLinks {
  std::unique_ptr<Mpi> mpi;  // outlives the links; null: all ranks share memory, so MPI was finalized
  HostLinks host;
  int rank = 0, ranks = 1;
  std::uint64_t bytes = 0;  // memory that this rank holds for the links
};

// Collective. Throws Error(kNotFound) where the plug-in is missing, Error(kInvalidArgument) where MPI's ranks
// are not those of the launcher, Error(kState) where MPI was initialized before, and Error(kIo) where a rank
// does not join within `patience`.
LaunchedLinks join_launched(const MpiLauncher& launcher, const Mpi::Settings& settings,
                            std::size_t ring_bytes, std::chrono::milliseconds patience);

}  // namespace sluice::comm
