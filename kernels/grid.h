#pragma once
#include <cstddef>
#include <cstdint>

namespace sluice::kernels {

// The grid of a parameter: blocks of kGridBlock elements, counted from its first one. The blocks' sums are
// the leaves of a PartialSum over the parameter, so that any part that consists of whole blocks can be summed
// separately.
inline constexpr std::size_t kGridBlock = 1024;

// A node of that tree: it covers 2^level leaves from `first` on, an index into an array of leaves.
struct SumNode {
  std::uint64_t first = 0, level = 0;
};

}  // namespace sluice::kernels
