#include "kernels/partial_sum.h"

#include "core/error.h"

namespace sluice::kernels {

void PartialSum::add(Node node) {
  ensure(end_ % (std::size_t{1} << node.level) == 0, "a node of 2^{} leaves cannot begin at leaf {}",
         node.level, end_);
  end_ += std::size_t{1} << node.level;
  // A node that ends with an odd index completes its parent, where its left neighbour is here.
  while (!nodes_.empty() && nodes_.back().level == node.level &&
         (end_ >> (node.level + 1)) << (node.level + 1) == end_) {
    node = {nodes_.back().value + node.value, static_cast<std::uint8_t>(node.level + 1)};
    nodes_.pop_back();
  }
  nodes_.push_back(node);
}

void PartialSum::add(const PartialSum& next) {
  ensure(next.first_ == end_, "the part of a sum from leaf {} is added to one that ends at leaf {}",
         next.first_, end_);
  for (const Node& node : next.nodes_) add(node);
}

double PartialSum::total() const {
  double total = 0;
  for (std::size_t i = nodes_.size(); i-- > 0;)
    total = i + 1 == nodes_.size() ? nodes_[i].value : nodes_[i].value + total;
  return total;
}

}  // namespace sluice::kernels
