#include "comm/group.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <span>
#include <utility>

#include "core/checksum.h"
#include "core/error.h"

namespace sluice::comm {
namespace {

std::vector<int> all_ranks(int ranks) {
  std::vector<int> all(static_cast<std::size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::vector<int> members_of(const Group& group, const std::vector<int>& numbers) {
  std::vector<int> sorted = numbers;
  std::ranges::sort(sorted);
  const bool are_there = !sorted.empty() && sorted.front() >= 0 && sorted.back() < group.size();
  if (!are_there || std::ranges::adjacent_find(sorted) != sorted.end() ||
      !std::ranges::binary_search(sorted, group.rank()))
    fail(ErrorCode::kInvalidArgument,
         "rank {} of {} asks for a group of the ranks [{}]: name different ones of these ranks, itself among "
         "them",
         group.rank(), group.size(), fmt::join(numbers, ", "));
  std::vector<int> members;
  for (const int number : numbers) members.push_back(group.member(number));
  return members;
}

Hosts hosts_of(const Group& group, const std::vector<int>& numbers) {
  std::vector<int> hosts;
  for (const int number : numbers) hosts.push_back(group.hosts().first_of(number));
  return Hosts(hosts);
}

}  // namespace

Group::Group(Hosts of_all, int rank)
    : members_(all_ranks(of_all.ranks())), hosts_(std::move(of_all)), rank_(rank) {}

Group::Group(const Group& of, const std::vector<int>& members)
    : members_(members_of(of, members)),
      hosts_(hosts_of(of, members)),
      rank_(*number_of(of.member(of.rank()))),
      salt_(checksum(std::as_bytes(std::span(members_)))) {}

std::optional<int> Group::number_of(int member) const {
  const auto place = std::ranges::find(members_, member);
  if (place == members_.end()) return std::nullopt;
  return static_cast<int>(place - members_.begin());
}

}  // namespace sluice::comm
