#pragma once
#include <cmath>
#include <cstddef>

#include "core/dtype.h"

// Bounds for how far results may lie from a reference in f64, or from another library's results. They follow
// from types and the lengths of sums, and from no measurement. tests/python/support/rounding.py has the same
// for Python.
namespace sluice::test {

// The largest relative error of a result that is rounded once.
inline double unit_roundoff(Dtype type) {
  return type == Dtype::kBf16 ? 0x1p-8 : type == Dtype::kF16 ? 0x1p-11 : 0x1p-24;
}

// The largest error of an f32 sum of n terms, in any order, relative to the sum of the terms' sizes, where
// each term was rounded once before (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd edition,
// section 4.2).
inline double of_sum(std::size_t terms) {
  const double roundings = static_cast<double>(terms) + 1, share = roundings * 0x1p-24;
  return share / (1 - share);
}

// One standard deviation of the error after so many independent roundings of either sign, relative to the
// norm of what is rounded (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM
// J. Sci. Comput. 41, 2019).
inline double of_roundings(double count, Dtype type = Dtype::kF32) {
  return unit_roundoff(type) * std::sqrt(count);
}

}  // namespace sluice::test
