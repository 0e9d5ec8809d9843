#pragma once
#include <memory>
#include <optional>

#include "allocator/ledger.h"
#include "bindings/cli/ranks.h"
#include "comm/launched_links.h"

namespace sluice::cli {

// The ranks of a run that an MPI launcher (mpirun, srun) has started.
class LaunchedRanks final : public Ranks {
 public:
  // Collective. Throws as comm::join_launched().
  LaunchedRanks(const comm::MpiLauncher& launcher, const comm::Deadlines& deadlines);
  ~LaunchedRanks() override;
  LaunchedRanks(const LaunchedRanks&) = delete;
  LaunchedRanks& operator=(const LaunchedRanks&) = delete;

  comm::Communicator& communicator() override { return *communicator_; }
  std::uint64_t bytes() const override;
  std::uint64_t bytes_in_use() const override;
  int ranks_here() const override { return links_.host.ranks_here; }
  double share_of_cpus() const override { return links_.host.share_of_cpus; }
  // Returns the memory that one of `ranks` ranks holds where they are on several hosts, with ranks_here of
  // them on its own.
  static std::uint64_t bytes(int ranks, int ranks_here);

 private:
  comm::LaunchedLinks links_;
  allocator::Ledger ledger_;
  std::optional<comm::Communicator> communicator_;
};

}  // namespace sluice::cli
