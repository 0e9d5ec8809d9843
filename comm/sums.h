#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/threads.h"

namespace sluice::comm {

// The element types that ranks add and gather: all of Dtype, and f64.
enum class Element : std::uint8_t { kF64 = 65 };
constexpr Element element_of(Dtype type) { return static_cast<Element>(type); }
std::size_t size_of(Element element);
std::string_view name_of(Element element);  // "f32", "f64"

// The fixed order in which a sum over ranks is added ("written order", docs/architecture.md section 9), as a
// postfix program: the arrays are pushed onto a stack one after another; after each one the two topmost
// entries, lower plus upper, are replaced by their sum as often as `merges` says. One entry is left at the
// end.
struct SumOrder {
  std::vector<int> from;  // by array: the rank that contributes it; it gives its arrays in their order
  std::vector<std::size_t> merges;  // by array: the number of additions after it is pushed

  int ranks() const;  // each of them contributes an array
  std::size_t arrays_of(int rank) const;
  std::size_t most_arrays() const;  // of any one rank
  bool operator==(const SumOrder&) const = default;
};

// The pairwise order of one array per rank, with ranks as leaves.
SumOrder order_of_ranks(int ranks);
// The pairwise order (core/pairwise.h) of leaves, of which rank owners[i] has borders[i] ... borders[i + 1]
// - 1. It contributes the largest subtrees that lie within these, in ascending order. REQUIRES: every rank
// has a leaf.
SumOrder pairwise_order(std::span<const std::size_t> borders, std::span<const int> owners);

// A subtree of the order of addition: the sum of the arrays first ... last - 1.
struct SumNode {
  std::size_t first, last;
  std::size_t merges;  // the number of additions after the subtree
};
// Returns the largest subtrees of the order to which only ranks contribute for which is_within() is true, in
// ascending order.
std::vector<SumNode> nodes_within(const SumOrder& order, const std::function<bool(int rank)>& is_within);

// Adds arrays of all ranks in the order that SumOrder describes.
class Adder {
 public:
  // Adds arrays of n elements each; merges[i] is the number of additions after array i. f32, bf16 and f16 are
  // added in f32 and rounded once; f64 is added in f64, one array after another, without `merges`. `into` may
  // be one of the arrays. For the other types than f64 an array may be null, which counts as -0, but not all
  // of them.
  void add(std::span<const std::byte* const> arrays, std::span<const std::size_t> merges, std::size_t n,
           Element element, std::byte* into);
  // The same for f32, bf16 and f16, where each array may have a type of its own.
  void add(std::span<const ConstArray> arrays, std::span<const std::size_t> merges, std::size_t n,
           Array into);

 private:
  void add_block(std::span<const ConstArray> arrays, std::span<const std::size_t> merges, std::size_t begin,
                 std::size_t n, std::size_t additions, Array into);
  static constexpr std::size_t kBlock = 4096;  // elements, so that partial sums stay in the caches

  Threads threads_{1};
  std::vector<std::vector<float>> sums_;  // partial sums, by depth of the stack
  std::vector<ConstArray> typed_, stack_;
};

}  // namespace sluice::comm
