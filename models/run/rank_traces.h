#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/communicator.h"
#include "core/json.h"
#include "core/trace.h"
#include "engine/machine/clocks.h"

namespace sluice::models {

// How a file of a trace begins.
inline constexpr std::string_view kTraceBeginning = "{\"otherData\":{\"dropped_events\"";

// Brings what the ranks of a run have traced into one file of rank 0, where each rank is a process, with
// times of rank 0's clock. The ranks' clocks are compared when this is made, and again before the file is
// written; what they are off by between is taken to change evenly. The file says in "otherData" which clock
// it is, and of each rank what it was ahead by, and how uncertain that is. No other rank needs a file, unless
// the run fails. Calls are collective, and wait. Thread rule: one thread at a time.
class RankTraces {
 public:
  // Does nothing where `path` is empty, which it is on all ranks or on none. Otherwise removes what ranks
  // wrote after the failure of an earlier run, those that take no part now included. communicator: null for a
  // run that trains alone; otherwise outlives this. place: where on the mesh this rank is, for the name of
  // its process; or nothing. `clock` is that of the traces. Throws the first failure of the run.
  RankTraces(comm::Communicator* communicator, std::string path, std::string place = "",
             std::function<std::int64_t()> clock = engine::steady_nanoseconds);

  // Writes the file, or nothing. Text travels a small part at a time. Rank 0 throws Error(kIo) where the file
  // cannot be written, and every rank the first failure of the run. REQUIRES: the trace is there if there is
  // a path.
  void save(const Trace* trace);
  // Writes a file of this rank alone, after a failure, when ranks tell each other nothing more: rank 0 at the
  // path, and others at path_of_rank(). Times are of rank 0's clock, as it was compared at the start, and
  // begin alike in the files of all ranks. Not collective. Throws Error(kIo).
  void save_alone(const Trace* trace) const;

 private:
  struct Member;
  std::vector<Member> members(const Trace& trace);
  TraceProcess process(const std::string& host, std::int64_t beginning) const;
  std::int64_t beginning_of(const std::vector<Member>& members) const;
  Json about(int rank, const Member& member) const;
  std::int64_t to_first(int rank, std::int64_t time) const;
  void send(TraceText& text);
  std::string receive(int rank);

  comm::Communicator* communicator_;
  std::string path_, place_;
  std::function<std::int64_t()> clock_;
  std::vector<engine::ClockReading> first_, last_;  // by rank; at the end as at the start, until then
};

}  // namespace sluice::models
