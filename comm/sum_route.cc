#include "comm/sum_route.h"

namespace sluice::comm {

SumRoute::SumRoute(const SumOrder& order, const Hosts& hosts, bool adds, int rank) : rank_(rank) {
  std::vector<std::size_t> begins{0};  // index of each rank's first array among all arrays
  for (const std::size_t arrays : order.arrays) begins.push_back(begins.back() + arrays);
  const auto begin_of = [&](int r) { return begins[static_cast<std::size_t>(r)]; };
  const auto are_added = [&](int r) { return adds && hosts.adds(r); };
  const auto nodes_of = [&](std::span<const int> ranks) {
    return nodes_within(order, begin_of(ranks.front()), begin_of(ranks.back() + 1));
  };
  const auto give = [&](int r, std::vector<Input>& inputs, std::vector<std::size_t>& merges) {
    for (std::size_t i = begin_of(r); i < begin_of(r + 1); ++i) {
      inputs.push_back({r, i - begin_of(r)});
      merges.push_back(order.merges[i]);
    }
  };
  for (int r = 0; r < hosts.ranks(); ++r) {
    to_.push_back(are_added(rank) && !hosts.on_one(r, rank) ? hosts.relay(rank, r) : r);
    if (hosts.on_one(r, rank) || !are_added(r)) {
      give(r, own_inputs_, own_merges_);
    } else if (r == hosts.first_of(r)) {
      relays_.push_back(hosts.relay(r, rank));
      const std::vector<SumNode> nodes = nodes_of(hosts.with(r));
      for (std::size_t i = 0; i < nodes.size(); ++i) {
        own_inputs_.push_back({relays_.back(), i});
        own_merges_.push_back(nodes[i].merges);
      }
    }
  }
  if (!are_added(rank)) return;
  for (const int r : hosts.with(rank)) give(r, host_inputs_, host_merges_);
  nodes_ = nodes_of(hosts.with(rank));
  const std::size_t begin = begin_of(hosts.first_of(rank));
  for (SumNode& node : nodes_) {
    node.first -= begin;
    node.last -= begin;
    host_merges_[node.last - 1] -= node.merges;
  }
}

}  // namespace sluice::comm
