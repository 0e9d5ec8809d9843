#pragma once
#include <cstddef>
#include <span>
#include <vector>

namespace sluice::comm {

// The host of each rank. All ranks have equal copies.
class Hosts {
 public:
  explicit Hosts(int ranks) : Hosts(std::vector<int>(static_cast<std::size_t>(ranks))) {}  // all on one
  // By rank, a number that identifies its host.
  explicit Hosts(const std::vector<int>& numbers);

  int ranks() const { return static_cast<int>(first_.size()); }
  bool all_on_one() const { return members_[0].size() == first_.size(); }
  bool on_one(int rank, int other) const { return first_of(rank) == first_of(other); }
  int first_of(int rank) const { return first_[static_cast<std::size_t>(rank)]; }  // its host's lowest rank
  std::span<const int> with(int rank) const { return members_[static_cast<std::size_t>(first_of(rank))]; }
  // Whether the host of `rank` adds the contributions of its ranks before it sends: it has several ranks,
  // with consecutive numbers.
  bool adds(int rank) const;
  // Returns the relay: the rank on the host of `rank` that sends and receives all data between that host and
  // `outer`, a rank of another host. The ranks of a host relay for about equally many outer ranks, and for
  // about equally many pieces where the data come in pieces.
  int relay(int rank, int outer, std::size_t piece = 0) const;
  // Returns how many ranks fetch the data of `rank` directly: all ranks of its host, itself included, and one
  // of each other host.
  int readers(int rank) const;

 private:
  std::vector<int> first_;  // by rank
  int hosts_ = 0;
  std::vector<std::size_t> turn_;          // by rank: its place on its host plus the index of the host
  std::vector<std::vector<int>> members_;  // by the first rank of a host: its ranks, ascending
};

}  // namespace sluice::comm
