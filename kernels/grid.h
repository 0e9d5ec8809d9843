#pragma once
#include <cstddef>
#include <cstdint>

namespace sluice::kernels {

// The grid of a parameter: blocks of so many elements, counted from its first one. A sum over a parameter has
// these blocks' sums as leaves of a PartialSum, so that whoever has whole blocks of it can sum its part.
inline constexpr std::size_t kGridBlock = 1024;

// A node of that tree, by where its leaves are in an array of leaves: 2^level from `first` on.
struct SumNode {
  std::uint64_t first = 0, level = 0;
};

}  // namespace sluice::kernels
