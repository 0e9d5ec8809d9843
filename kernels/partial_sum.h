#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/pairwise.h"

namespace sluice::kernels {

// The contribution of consecutive leaves to a pairwise sum over leaves 0, 1, ... (docs/architecture.md,
// section 9). It is stored as the largest subtrees of that summation that lie within the leaves. So the
// leaves may be cut into parts anywhere: combining the parts gives the same bits. Thread rule: one thread at
// a time.
class PartialSum {
 public:
  struct Node {
    double value = 0;
    std::uint8_t level = 0;  // the node is the sum of 2^level leaves
    bool operator==(const Node&) const = default;
  };
  PartialSum() = default;
  explicit PartialSum(std::size_t first) : first_(first), stack_(first) {}

  void add(double leaf) { add(Node{leaf, 0}); }  // adds the next leaf
  // Adds the next 2^level leaves. REQUIRES: their number divides the index of the first one.
  void add(Node node);
  void add(const PartialSum& next);  // REQUIRES: next.first() == end()

  std::size_t first() const { return first_; }
  std::size_t end() const { return stack_.end(); }
  std::vector<Node> nodes() const;  // in the order of their leaves
  double total() const;             // the sum of its leaves; of all leaves: the tree's sum

 private:
  std::size_t first_ = 0;
  PairwiseStack stack_;         // the levels of the nodes
  std::vector<double> values_;  // by node
};

// Returns the levels of the largest nodes of that tree, of at most 2^most leaves each, that lie within
// `leaves` leaves from `first` on, in the order of the leaves.
std::vector<std::uint8_t> node_levels(std::size_t first, std::size_t leaves, std::uint8_t most);

}  // namespace sluice::kernels
