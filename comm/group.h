#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "comm/hosts.h"

namespace sluice::comm {

// The ranks of a run that take part in a communicator's calls. A rank's number in the group is its place
// here; the rest of a run uses the rank's number in the run. Immutable; any thread.
class Group {
 public:
  Group(Hosts of_all, int rank);  // all ranks
  // Selects members of another group by their numbers there. Throws Error(kInvalidArgument) where there is no
  // such number, a number is named twice, or this rank is not among them.
  Group(const Group& of, const std::vector<int>& members);

  int rank() const { return rank_; }  // this rank's number in the group
  int size() const { return static_cast<int>(members_.size()); }
  const Hosts& hosts() const { return hosts_; }  // indexed by numbers in the group
  int member(int number) const { return members_[static_cast<std::size_t>(number)]; }
  std::optional<int> number_of(int member) const;

  // Returns an id for a call of this group that no other group uses in the run.
  std::uint64_t id_of_run(std::uint64_t id) const { return id + salt_; }

 private:
  std::vector<int> members_;
  Hosts hosts_;
  int rank_;
  std::uint64_t salt_ = 0;  // a hash of the members, so that groups do not share ids; 0 for all ranks
};

}  // namespace sluice::comm
