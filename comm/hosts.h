#pragma once
#include <cstddef>
#include <span>
#include <vector>

namespace sluice::comm {

// Which ranks are on one host. All ranks have it alike.
class Hosts {
 public:
  explicit Hosts(int ranks) : Hosts(std::vector<int>(static_cast<std::size_t>(ranks))) {}  // all on one
  // By rank, a number that the ranks of one host have alike.
  explicit Hosts(const std::vector<int>& numbers);

  int ranks() const { return static_cast<int>(first_.size()); }
  bool all_on_one() const { return members_[0].size() == first_.size(); }
  bool on_one(int rank, int other) const { return first_of(rank) == first_of(other); }
  int first_of(int rank) const { return first_[static_cast<std::size_t>(rank)]; }  // the first of its host
  std::span<const int> with(int rank) const { return members_[static_cast<std::size_t>(first_of(rank))]; }
  // Whether its host adds what its ranks give before it sends: they are several, whose numbers have no gap.
  bool adds(int rank) const;
  // The rank on the host of `rank` that sends and receives for that host what is between it and `outer`, a
  // rank of another host. Each rank of a host does so for about as many; and for about as many pieces, where
  // what is between them comes in pieces.
  int relay(int rank, int outer, std::size_t piece = 0) const;
  // How many ranks fetch what `rank` has: those of its host, itself among them, and one of each other host.
  int readers(int rank) const;

 private:
  std::vector<int> first_;  // by rank
  int hosts_ = 0;
  std::vector<std::size_t> turn_;  // by rank: its place on its host, and the host's among hosts, added
  std::vector<std::vector<int>> members_;  // ascending; by the first rank of a host
};

}  // namespace sluice::comm
