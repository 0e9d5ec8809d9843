#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "allocator/ledger.h"
#include "bindings/c/status.h"
#include "comm/communicator.h"
#include "comm/launched_links.h"
#include "comm/links.h"
#include "comm/local_links.h"

// The struct behind sluice_ranks, and how it is made. Private to this room.
struct sluice_ranks {
  // link_bytes: what the process holds for the links, which are over `memory` where it is not null.
  sluice_ranks(std::unique_ptr<sluice::comm::Links> links, const sluice::comm::Deadlines& deadlines,
               std::uint64_t link_bytes, std::unique_ptr<sluice::comm::LocalMemory> memory = nullptr);
  sluice_ranks(sluice::comm::LaunchedLinks launched, const sluice::comm::Deadlines& deadlines);

  std::uint64_t bytes() const;  // what the process holds for it in all

  const std::uint64_t link_bytes;
  const int ranks_here;  // how many are on this host, as far as that is known; else 1
  const std::unique_ptr<sluice::comm::LocalMemory> memory;
  const std::unique_ptr<sluice::comm::Mpi> mpi;  // whose links they are, where it is not null
  sluice::allocator::Ledger ledger;
  sluice::comm::Communicator communicator;
  std::atomic<bool> has_engine{false};
};

namespace sluice::c {

comm::Deadlines deadlines_of(const sluice_ranks_options* options);  // null: all defaults
// What a process holds for a rank of so many, which share memory where they can.
std::uint64_t bytes_of_ranks(int ranks);

// Takes the ranks for one engine, as long as it lives.
class RanksOfEngine {
 public:
  explicit RanksOfEngine(sluice_ranks* ranks);  // null: there are none
  ~RanksOfEngine();
  RanksOfEngine(const RanksOfEngine&) = delete;
  RanksOfEngine& operator=(const RanksOfEngine&) = delete;
  comm::Communicator* communicator() const { return ranks_ == nullptr ? nullptr : &ranks_->communicator; }

 private:
  sluice_ranks* const ranks_;
};

}  // namespace sluice::c
