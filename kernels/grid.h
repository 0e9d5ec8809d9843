#pragma once
#include <cstddef>

namespace sluice::kernels {

// The grid of a parameter: blocks of so many elements, counted from its first one. A sum over a parameter has
// these blocks' sums as leaves of a PartialSum, so that whoever has whole blocks of it can sum its part.
inline constexpr std::size_t kGridBlock = 1024;

}  // namespace sluice::kernels
