#include "comm/hosts.h"

#include <algorithm>

namespace sluice::comm {

Hosts::Hosts(const std::vector<int>& numbers) : members_(numbers.size()) {
  std::vector<std::size_t> place_of_host(numbers.size());  // by the host's first rank
  for (std::size_t rank = 0; rank < numbers.size(); ++rank) {
    const auto first = static_cast<std::size_t>(std::ranges::find(numbers, numbers[rank]) - numbers.begin());
    if (first == rank) place_of_host[rank] = static_cast<std::size_t>(hosts_++);
    first_.push_back(static_cast<int>(first));
    turn_.push_back(place_of_host[first] + members_[first].size());
    members_[first].push_back(static_cast<int>(rank));
  }
}

bool Hosts::adds(int rank) const {
  const std::span<const int> all = with(rank);
  return all.size() > 1 && static_cast<std::size_t>(all.back() - all.front()) + 1 == all.size();
}

int Hosts::relay(int rank, int outer, std::size_t piece) const {
  const std::span<const int> all = with(rank);
  return all[(turn_[static_cast<std::size_t>(outer)] + piece) % all.size()];
}

int Hosts::readers(int rank) const { return static_cast<int>(with(rank).size()) + hosts_ - 1; }

}  // namespace sluice::comm
