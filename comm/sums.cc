#include "comm/sums.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/pairwise.h"
#include "kernels/elementwise.h"

namespace sluice::comm {
namespace {

// Arrays of other ranks may be unaligned.
void add_doubles(std::span<const std::byte* const> arrays, std::size_t n, std::byte* into) {
  const auto load = [](const std::byte* from, std::size_t i) {
    double value = 0;
    std::memcpy(&value, from + i * sizeof value, sizeof value);
    return value;
  };
  for (std::size_t i = 0; i < n; ++i) {
    double sum = load(arrays[0], i);
    for (const std::byte* array : arrays.subspan(1)) sum += load(array, i);
    std::memcpy(into + i * sizeof sum, &sum, sizeof sum);
  }
}

}  // namespace

std::size_t size_of(Element element) {
  if (element == Element::kF64) return sizeof(double);
  return size_of(static_cast<Dtype>(element));
}

std::string_view name_of(Element element) {
  if (element == Element::kF64) return "f64";
  if (static_cast<int>(element) > static_cast<int>(Dtype::kU8)) return "an unknown type";
  return name_of(static_cast<Dtype>(element));
}

int SumOrder::ranks() const { return from.empty() ? 0 : *std::ranges::max_element(from) + 1; }

std::size_t SumOrder::arrays_of(int rank) const {
  return static_cast<std::size_t>(std::ranges::count(from, rank));
}

std::size_t SumOrder::most_arrays() const {
  std::size_t most = 0;
  for (int rank = 0; rank < ranks(); ++rank) most = std::max(most, arrays_of(rank));
  return most;
}

SumOrder order_of_ranks(int ranks) {
  std::vector<std::size_t> borders(static_cast<std::size_t>(ranks) + 1);
  std::vector<int> owners(static_cast<std::size_t>(ranks));
  std::iota(borders.begin(), borders.end(), 0);
  std::iota(owners.begin(), owners.end(), 0);
  return pairwise_order(borders, owners);
}

SumOrder pairwise_order(std::span<const std::size_t> borders, std::span<const int> owners) {
  SumOrder order;
  PairwiseStack all;
  for (std::size_t i = 0; i < owners.size(); ++i) {
    PairwiseStack own(borders[i]);
    for (std::size_t leaf = borders[i]; leaf < borders[i + 1]; ++leaf) own.push();
    for (const std::uint8_t level : own.levels()) {
      order.from.push_back(owners[i]);
      order.merges.push_back(all.push(level));
    }
  }
  order.merges.back() += all.carries();
  return order;
}

std::vector<SumNode> nodes_within(const SumOrder& order, const std::function<bool(int rank)>& is_within) {
  std::vector<bool> within;  // of the sums on the stack
  std::vector<SumNode> nodes;
  for (std::size_t i = 0; i < order.from.size(); ++i) {
    const bool here = is_within(order.from[i]);
    within.push_back(here);
    if (here) nodes.push_back({i, i + 1, 0});
    for (std::size_t merge = 0; merge < order.merges[i]; ++merge) {
      const bool upper = within.back();
      within.pop_back();
      const bool both = upper && within.back();
      within.back() = both;
      if (both) {
        nodes.pop_back();
        nodes.back().last = i + 1;
      } else if (here) {
        ++nodes.back().merges;
      }
    }
  }
  return nodes;
}

void Adder::add(std::span<const std::byte* const> arrays, std::span<const std::size_t> merges, std::size_t n,
                Element element, std::byte* into) {
  if (element == Element::kF64) return add_doubles(arrays, n, into);
  const auto type = static_cast<Dtype>(element);
  typed_.clear();
  for (const std::byte* array : arrays) typed_.push_back({array, type});
  add(typed_, merges, n, {into, type});
}

void Adder::add(std::span<const ConstArray> arrays, std::span<const std::size_t> merges, std::size_t n,
                Array into) {
  if (n == 0) return;
  const auto is_there = [](const ConstArray& array) { return array.data != nullptr; };
  const auto additions = static_cast<std::size_t>(std::ranges::count_if(arrays, is_there)) - 1;
  if (additions == 0) {
    const ConstArray& only = *std::ranges::find_if(arrays, is_there);
    if (only.type != into.type) return kernels::convert(threads_, n, only, into);
    if (only.data != into.data) std::memcpy(into.data, only.data, n * size_of(into.type));
    return;
  }
  for (std::size_t begin = 0; begin < n; begin += kBlock)
    add_block(arrays, merges, begin, std::min(kBlock, n - begin), additions, into);
}

void Adder::add_block(std::span<const ConstArray> arrays, std::span<const std::size_t> merges,
                      std::size_t begin, std::size_t n, std::size_t additions, Array into) {
  stack_.clear();
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    stack_.push_back(arrays[i].data == nullptr ? arrays[i] : arrays[i].at(begin));
    for (std::size_t merge = merges[i]; merge > 0; --merge) {
      const ConstArray upper = stack_.back();
      stack_.pop_back();
      if (upper.data == nullptr) continue;
      ConstArray& lower = stack_.back();
      const std::size_t height = stack_.size();
      while (sums_.size() <= height) sums_.emplace_back(kBlock);
      if (lower.data == nullptr) {  // the upper one moves down, with its buffer
        lower = upper;
        std::swap(sums_[height - 1], sums_[height]);
        continue;
      }
      const Array to = --additions == 0 ? into.at(begin) : Array{sums_[height - 1].data(), Dtype::kF32};
      kernels::add(threads_, n, lower, upper, to);
      lower = to;
    }
  }
}

}  // namespace sluice::comm
