#pragma once
#include <sys/types.h>

#include <memory>
#include <optional>
#include <stop_token>
#include <thread>
#include <vector>

#include "allocator/ledger.h"
#include "bindings/cli/ranks.h"
#include "comm/local_links.h"

namespace sluice::cli {

// The ranks of a run on this machine, one process each (`--ranks`). The process that the user has started is
// rank 0. It starts the others with the same program and arguments, and shares memory with them. Thread rule:
// one thread.
class LocalRanks final : public Ranks {
 public:
  // Rank 0 starts the other ranks; another rank joins them. Throws Error(kInvalidArgument | kIo). REQUIRES:
  // ranks > 1.
  LocalRanks(int ranks, const comm::Deadlines& deadlines);
  // Rank 0 waits for the other processes, which end when the run has ended or failed.
  ~LocalRanks() override;
  LocalRanks(const LocalRanks&) = delete;
  LocalRanks& operator=(const LocalRanks&) = delete;

  comm::Communicator& communicator() override { return *communicator_; }
  std::uint64_t bytes() const override { return bytes(memory_->ranks()); }
  std::uint64_t bytes_in_use() const override { return 0; }  // bytes that pass through rings use them first
  int ranks_here() const override { return memory_->ranks(); }
  double share_of_cpus() const override { return 1.0 / memory_->ranks(); }
  static std::uint64_t bytes(int ranks);  // memory that one of `ranks` ranks holds

  // Returns the rank of this process; 0 where no other rank has started it.
  static int own_rank();

 private:
  void start_others(int ranks);
  void watch(const std::stop_token& end);

  std::vector<pid_t> started_;
  std::unique_ptr<comm::LocalMemory> memory_;
  allocator::Ledger ledger_;
  std::optional<comm::Communicator> communicator_;
  std::jthread watch_;  // detects the end of ranks, also before they have joined
};

}  // namespace sluice::cli
