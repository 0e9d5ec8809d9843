#pragma once
#include <memory>
#include <optional>

#include "allocator/ledger.h"
#include "bindings/cli/ranks.h"
#include "comm/host_links.h"
#include "comm/mpi_links.h"

namespace sluice::cli {

// The ranks of a run that a launcher of MPI has started (mpirun, srun). Those of one host share memory; only
// others exchange bytes through MPI.
class LaunchedRanks final : public Ranks {
 public:
  // Collective. Throws Error(kNotFound) where the plug-in is missing, Error(kInvalidArgument) where MPI has
  // found other ranks than the launcher has started, and Error(kIo) where a rank does not come.
  LaunchedRanks(const comm::MpiLauncher& launcher, const comm::Deadlines& deadlines);
  ~LaunchedRanks() override;
  LaunchedRanks(const LaunchedRanks&) = delete;
  LaunchedRanks& operator=(const LaunchedRanks&) = delete;

  comm::Communicator& communicator() override { return *communicator_; }
  std::uint64_t bytes() const override { return bytes_; }
  int ranks_here() const override { return ranks_here_; }
  double share_of_cpus() const override { return share_of_cpus_; }

 private:
  std::unique_ptr<comm::Mpi> mpi_;  // null where all ranks share memory
  allocator::Ledger ledger_;
  std::optional<comm::Communicator> communicator_;
  std::uint64_t bytes_ = 0;
  int ranks_here_ = 1;
  double share_of_cpus_ = 1;
};

}  // namespace sluice::cli
