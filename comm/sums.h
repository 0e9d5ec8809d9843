#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "core/dtype.h"
#include "core/threads.h"

namespace sluice::comm {

// The types of elements that ranks add and gather: those of Dtype, and two of 8 bytes.
enum class Element : std::uint8_t { kI64 = 64, kF64 = 65 };
constexpr Element element_of(Dtype type) { return static_cast<Element>(type); }
std::size_t size_of(Element element);
std::string_view name_of(Element element);  // "f32", "i64"

// The written order of a sum over ranks. Their arrays are pushed onto a stack, rank after rank; after some of
// them the two topmost are added, the lower one plus the upper one, until one is left at the end.
struct SumOrder {
  std::vector<std::size_t> arrays;  // how many each rank gives
  std::vector<std::size_t> merges;  // after each array, rank after rank: how often the two topmost are added

  std::size_t most_arrays() const;  // of one rank
  bool operator==(const SumOrder&) const = default;
};

// Of one array of each rank: pairwise, as below, with the ranks as numbers.
SumOrder order_of_ranks(int ranks);
// The pairwise order (core/pairwise.h) of the numbers of which rank r has borders[r] ... borders[r + 1] - 1.
// Each rank gives the largest sums of that order that lie within its numbers, in ascending order. REQUIRES:
// every rank has a number.
SumOrder pairwise_order(std::span<const std::size_t> borders);

// A sum of the written order over the arrays first ... last - 1.
struct SumNode {
  std::size_t first, last;
  std::size_t merges;  // after it, how often the two topmost sums become one
};
// The largest sums of the order that lie within the arrays first ... last - 1 of all ranks, in ascending
// order.
std::vector<SumNode> nodes_within(const SumOrder& order, std::size_t first, std::size_t last);

// Adds arrays of all ranks in the written order.
class Adder {
 public:
  // Adds arrays of n elements each, of which merges[i] says how often sums become one after array i: in f32
  // for f32, bf16 and f16, rounded once; in f64 for f64; and exactly for i64, which wraps around. `into` may
  // be one of the arrays. The elements of 8 bytes are added one array after another. Of others an array may
  // be null: it counts as -0; but not all of them.
  void add(std::span<const std::byte* const> arrays, std::span<const std::size_t> merges, std::size_t n,
           Element element, std::byte* into);
  // The same of f32, bf16 and f16, where each array has its own of these types.
  void add(std::span<const ConstArray> arrays, std::span<const std::size_t> merges, std::size_t n,
           Array into);

 private:
  void add_block(std::span<const ConstArray> arrays, std::span<const std::size_t> merges, std::size_t begin,
                 std::size_t n, std::size_t additions, Array into);
  static constexpr std::size_t kBlock = 4096;  // elements, so that the sums so far stay in the caches

  Threads threads_{1};
  std::vector<std::vector<float>> sums_;  // by height on the stack
  std::vector<ConstArray> typed_, stack_;
};

}  // namespace sluice::comm
