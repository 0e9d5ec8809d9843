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

// The first bytes of a trace file.
inline constexpr std::string_view kTraceBeginning = "{\"otherData\":{\"dropped_events\"";

// Merges the traces of all ranks into one file of rank 0, where each rank is a process, with times of rank
// 0's clock. The ranks' clocks are compared at construction and again before the file is written; drift
// between the two is taken to be linear. "otherData" has the clock's name, and each rank's offset and its
// uncertainty. No other rank needs a file, unless the run fails. Calls are collective, and wait. Thread rule:
// one thread at a time.
class RankTraces {
 public:
  // Does nothing where `path` is empty, which it is on all ranks or on none. Otherwise removes the files that
  // ranks wrote after the failure of an earlier run, also those of ranks that do not take part now.
  // communicator: null for a run of one rank; otherwise outlives this. place: this rank's place on the mesh,
  // for the name of its process; may be empty. clock: the traces' clock. Throws the first failure of the run.
  RankTraces(comm::Communicator* communicator, std::string path, std::string place = "",
             std::function<std::int64_t()> clock = engine::steady_nanoseconds);

  // Writes the file, if there is a path. Text is sent in small parts. Rank 0 throws Error(kIo) where the file
  // cannot be written, and every rank the first failure of the run. REQUIRES: the trace is not null if there
  // is a path.
  void save(const Trace* trace);
  // Writes a file of this rank alone, after a failure, when ranks no longer communicate: rank 0 at the path,
  // others at path_of_rank(). Times are of rank 0's clock, as compared at the start, with the same origin in
  // all ranks' files. Not collective. Throws Error(kIo).
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
  std::vector<engine::ClockReading> first_, last_;  // by rank; until the end, last_ equals first_
};

}  // namespace sluice::models
