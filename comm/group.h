#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "comm/hosts.h"

namespace sluice::comm {

// Which ranks of a run take part in the calls of a communicator. Their numbers among themselves are their
// places here; all else of the run counts its ranks. Immutable; any thread.
class Group {
 public:
  Group(Hosts of_all, int rank);  // all ranks
  // Members of another group, by their numbers there. Throws Error(kInvalidArgument) where there is no such
  // number, one is there twice, or this rank's is not among them.
  Group(const Group& of, const std::vector<int>& members);

  int rank() const { return rank_; }  // this one's number in it
  int size() const { return static_cast<int>(members_.size()); }
  const Hosts& hosts() const { return hosts_; }  // by numbers in it
  int member(int number) const { return members_[static_cast<std::size_t>(number)]; }
  std::optional<int> number_of(int member) const;

  // The id that a call of the group has among the calls of all groups.
  std::uint64_t id_of_run(std::uint64_t id) const { return id + salt_; }

 private:
  std::vector<int> members_;
  Hosts hosts_;
  int rank_;
  std::uint64_t salt_ = 0;  // a hash of the members, so that groups do not share ids; of all ranks: none
};

}  // namespace sluice::comm
