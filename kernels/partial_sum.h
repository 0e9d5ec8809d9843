#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/pairwise.h"

namespace sluice::kernels {

// The part that some consecutive leaves have in a sum whose order is a tree: leaf 0, 1, ... are added
// pairwise, neighbours first, and an odd last one is carried (docs/architecture.md, section 9). It is kept as
// the largest nodes of that tree which lie within the part. So wherever the leaves are cut into parts,
// putting the parts together gives the same bits. Thread rule: one thread at a time.
class PartialSum {
 public:
  struct Node {
    double value = 0;
    std::uint8_t level = 0;  // the node is the sum of 2^level leaves
    bool operator==(const Node&) const = default;
  };
  PartialSum() = default;
  explicit PartialSum(std::size_t first) : first_(first), stack_(first) {}

  void add(double leaf) { add(Node{leaf, 0}); }  // the next leaf
  // The next leaves. REQUIRES: their number divides the index of the first one.
  void add(Node node);
  void add(const PartialSum& next);  // REQUIRES: next.first() == end()

  std::size_t first() const { return first_; }
  std::size_t end() const { return stack_.end(); }
  std::vector<Node> nodes() const;  // in the order of their leaves
  double total() const;             // of its leaves; where these are all, the tree's

 private:
  std::size_t first_ = 0;
  PairwiseStack stack_;         // which nodes there are
  std::vector<double> values_;  // by node
};

// The levels of the largest nodes of that tree, of up to 2^most leaves each, that lie within so many leaves
// from the first one on, in the order of the leaves.
std::vector<std::uint8_t> node_levels(std::size_t first, std::size_t leaves, std::uint8_t most);

}  // namespace sluice::kernels
