#pragma once
#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "comm/hosts.h"
#include "comm/sums.h"

namespace sluice::comm {

// What one rank has to do with a sum over the ranks of several hosts. Where a host's ranks are neighbours,
// what they give for a part of a rank of another host goes to their relay for it (Hosts), which adds what of
// the written order lies within them, and sends these sums. All else goes to the rank that has the part.
class SumRoute {
 public:
  // Adds on hosts only where `adds`.
  SumRoute(const SumOrder& order, const Hosts& hosts, bool adds, int rank);

  struct Input {
    int from;
    std::size_t number;  // of that rank's arrays, or of a relay's sums
  };
  // What the rank's own part is the sum of.
  std::span<const Input> own_inputs() const { return own_inputs_; }
  std::span<const std::size_t> own_merges() const { return own_merges_; }
  std::span<const int> relays() const { return relays_; }  // ranks that relay some of it
  bool relays_to_own(int from) const { return std::ranges::count(relays_, from) > 0; }

  // Where this rank's arrays of the part of `owner` go; to itself, where it relays them.
  int to(int owner) const { return to_[static_cast<std::size_t>(owner)]; }
  bool relays_for(int owner) const { return owner != rank_ && to(owner) == rank_; }
  // What it then adds: node i is of the inputs nodes()[i].first ... last - 1.
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
