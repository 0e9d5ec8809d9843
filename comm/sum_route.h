#pragma once
#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "comm/hosts.h"
#include "comm/sums.h"

namespace sluice::comm {

// This rank's role in a sum over the ranks of several hosts. Where the ranks of a host have consecutive
// numbers, their contributions to the part of a rank on another host go to the relay of their host for that
// rank (Hosts). The relay adds as much as the order of addition allows and sends these partial sums. All
// other contributions go directly to the owner of the part.
class SumRoute {
 public:
  // Hosts add before sending only where `adds` is true.
  SumRoute(const SumOrder& order, const Hosts& hosts, bool adds, int rank);

  struct Input {
    int from;
    std::size_t number;  // index among that rank's arrays, or among a relay's partial sums
  };
  // The summands of this rank's own part, in the order of addition.
  std::span<const Input> own_inputs() const { return own_inputs_; }
  std::span<const std::size_t> own_merges() const { return own_merges_; }
  std::span<const int> relays() const { return relays_; }  // the ranks that relay contributions to it
  bool relays_to_own(int from) const { return std::ranges::count(relays_, from) > 0; }

  // Returns the rank to which this one sends its arrays for the part of `owner`; itself where it is the
  // relay.
  int to(int owner) const { return to_[static_cast<std::size_t>(owner)]; }
  bool relays_for(int owner) const { return owner != rank_ && to(owner) == rank_; }
  // The summands of the blocks that this rank relays: partial sum i consists of the inputs nodes()[i].first
  // ... last - 1.
  std::span<const Input> host_inputs() const { return host_inputs_; }
  std::span<const std::size_t> host_merges() const { return host_merges_; }
  std::span<const SumNode> nodes() const { return nodes_; }

 private:
  const int rank_;
  std::vector<Input> own_inputs_, host_inputs_;
  std::vector<std::size_t> own_merges_, host_merges_;
  std::vector<SumNode> nodes_;
  std::vector<int> relays_, to_;
};

}  // namespace sluice::comm
