#include "comm/hosts.h"

#include <algorithm>

namespace sluice::comm {

Hosts::Hosts(const std::vector<int>& numbers) : members_(numbers.size()) {
  for (std::size_t rank = 0; rank < numbers.size(); ++rank) {
    const auto first = std::ranges::find(numbers, numbers[rank]) - numbers.begin();
    first_.push_back(static_cast<int>(first));
    members_[static_cast<std::size_t>(first)].push_back(static_cast<int>(rank));
  }
}

bool Hosts::are_neighbours(int rank) const {
  const std::span<const int> all = with(rank);
  return static_cast<std::size_t>(all.back() - all.front()) + 1 == all.size();
}

int Hosts::relay(int rank, int outer) const {
  const std::span<const int> all = with(rank);
  return all[static_cast<std::size_t>(outer) % all.size()];
}

}  // namespace sluice::comm
