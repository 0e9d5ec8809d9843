#include "kernels/partial_sum.h"

#include <algorithm>
#include <bit>

#include "core/error.h"

namespace sluice::kernels {

void PartialSum::add(Node node) {
  ensure(end() % (std::size_t{1} << node.level) == 0, "a node of 2^{} leaves cannot begin at leaf {}",
         node.level, end());
  values_.push_back(node.value);
  for (std::size_t merges = stack_.push(node.level); merges > 0; --merges) {
    const double upper = values_.back();
    values_.pop_back();
    values_.back() += upper;
  }
}

void PartialSum::add(const PartialSum& next) {
  ensure(next.first_ == end(), "the part of a sum from leaf {} is added to one that ends at leaf {}",
         next.first_, end());
  for (const Node& node : next.nodes()) add(node);
}

std::vector<PartialSum::Node> PartialSum::nodes() const {
  std::vector<Node> nodes;
  for (std::size_t i = 0; i < values_.size(); ++i) nodes.push_back({values_[i], stack_.levels()[i]});
  return nodes;
}

double PartialSum::total() const {
  double total = 0;
  for (std::size_t i = values_.size(); i-- > 0;)
    total = i + 1 == values_.size() ? values_[i] : values_[i] + total;
  return total;
}

std::vector<std::uint8_t> node_levels(std::size_t first, std::size_t leaves, std::uint8_t most) {
  std::vector<std::uint8_t> levels;
  for (const std::size_t end = first + leaves; first < end; first += std::size_t{1} << levels.back()) {
    const int fitting = std::bit_width(end - first) - 1, aligned = std::countr_zero(first);
    levels.push_back(static_cast<std::uint8_t>(std::min({fitting, aligned, int{most}})));
  }
  return levels;
}

}  // namespace sluice::kernels
