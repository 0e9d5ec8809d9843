#pragma once
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "allocator/ledger.h"
#include "bindings/c/status.h"
#include "comm/communicator.h"
#include "comm/host_links.h"
#include "comm/launched_links.h"
#include "comm/links.h"
#include "comm/local_links.h"

// The struct behind sluice_ranks and its construction. Private to this room.
namespace sluice::c {

// The time by which a packet function of the caller should return, on the one thread that calls these
// functions.
class FunctionClock {
 public:
  using Clock = comm::Links::Clock;
  explicit FunctionClock(Clock::duration limit) : limit_(limit) {}
  void begin(Clock::time_point due) { due_ = due.time_since_epoch().count(); }
  void end() { due_ = kNone; }
  Clock::duration limit() const { return limit_; }
  // Whether a function is late by more than the limit, after which other ranks consider this one dead.
  bool is_late() const {
    const Clock::rep due = due_;
    return due != kNone && Clock::now() > Clock::time_point(Clock::duration(due)) + limit_;
  }

 private:
  static constexpr Clock::rep kNone = std::numeric_limits<Clock::rep>::max();
  const Clock::duration limit_;
  std::atomic<Clock::rep> due_{kNone};
};

}  // namespace sluice::c

struct sluice_ranks {
  // link_bytes: memory that the process holds for the links. `memory`, if not null, is what they work over.
  sluice_ranks(std::unique_ptr<sluice::comm::Links> links, const sluice::comm::Deadlines& deadlines,
               std::uint64_t link_bytes, std::unique_ptr<sluice::comm::LocalMemory> memory = nullptr);
  // Over functions of the caller, which has stated the host of each rank.
  sluice_ranks(sluice::comm::HostLinks links, const sluice::comm::Deadlines& deadlines,
               std::uint64_t link_bytes);
  sluice_ranks(sluice::comm::LaunchedLinks launched, const sluice::comm::Deadlines& deadlines);
  // A group of ranks of `of`, by their numbers there, over its links. `of` outlives the group.
  sluice_ranks(sluice_ranks& of, const std::vector<int>& members);

  std::uint64_t bytes() const;  // all memory that the process holds for it

  const pid_t process = ::getpid();  // the process that made it, which has its threads

  sluice_ranks& all;  // all ranks that have joined, of which this is a group; or itself
  std::shared_ptr<const sluice::c::FunctionClock> functions;  // of links by the caller's functions; or null
  const std::uint64_t link_bytes;
  const int ranks_here;  // number of ranks on this host where it is known; else 1
  const std::unique_ptr<sluice::comm::LocalMemory> memory;
  const std::unique_ptr<sluice::comm::Mpi> mpi;  // the owner of the links if they are MPI's, else null
  sluice::allocator::Ledger ledger;
  const std::unique_ptr<sluice::comm::Communicator> made;
  sluice::comm::Communicator& communicator = *made;
  std::atomic<bool> has_engine{false};
};

namespace sluice::c {

inline constexpr std::size_t kRing = std::size_t{1} << 20;  // bytes of the ring between two ranks of a host

comm::Deadlines deadlines_of(const sluice_ranks_options* options);  // null: all defaults
// Returns the memory that a process holds for one of `ranks` ranks, which share memory where they can.
std::uint64_t bytes_of_ranks(int ranks);

// Frees a handle, but only in the process that made it: a forked child lacks its threads, and its locks may
// be held for ever.
template <class Handle>
void destroy(Handle* handle) {
  if (handle != nullptr && handle->process == ::getpid()) delete handle;
}

// Reserves the ranks, with all their groups, for one engine while this lives.
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
