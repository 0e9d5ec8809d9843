#include "comm/sum_route.h"

#include <map>
#include <utility>

namespace sluice::comm {

SumRoute::SumRoute(const SumOrder& order, const Hosts& hosts, bool adds, int rank) : rank_(rank) {
  const auto are_added = [&](int r) { return adds && hosts.adds(r); };
  const auto nodes_of = [&](int host) {
    return nodes_within(order, [&](int r) { return hosts.on_one(r, host); });
  };
  std::map<std::size_t, std::pair<Input, std::size_t>> own;  // inputs and merges, by the last of their arrays
  for (int r = 0; r < hosts.ranks(); ++r) {
    to_.push_back(are_added(rank) && !hosts.on_one(r, rank) ? hosts.relay(rank, r) : r);
    if (hosts.on_one(r, rank) || !are_added(r) || r != hosts.first_of(r)) continue;
    relays_.push_back(hosts.relay(r, rank));
    const std::vector<SumNode> nodes = nodes_of(r);
    for (std::size_t i = 0; i < nodes.size(); ++i)
      own[nodes[i].last - 1] = {{relays_.back(), i}, nodes[i].merges};
  }
  std::vector<std::size_t> arrays(static_cast<std::size_t>(hosts.ranks()));  // so far, by rank
  std::vector<std::size_t> before;  // by array: how many are before it that ranks of this host contribute
  for (std::size_t i = 0; i < order.from.size(); ++i) {
    const int r = order.from[i];
    const bool is_here = hosts.on_one(r, rank);
    const Input input{r, arrays[static_cast<std::size_t>(r)]++};
    if (is_here || !are_added(r)) own[i] = {input, order.merges[i]};
    before.push_back(host_inputs_.size());
    if (!is_here || !are_added(rank)) continue;
    host_inputs_.push_back(input);
    host_merges_.push_back(order.merges[i]);
  }
  for (const auto& [last, given] : own) {
    own_inputs_.push_back(given.first);
    own_merges_.push_back(given.second);
  }
  if (!are_added(rank)) return;
  for (const auto& [first, last, merges] : nodes_of(rank)) {
    nodes_.push_back({before[first], before[last - 1] + 1, merges});
    host_merges_[nodes_.back().last - 1] -= merges;
  }
}

}  // namespace sluice::comm
