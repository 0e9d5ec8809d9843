#pragma once
#include <cmath>
#include <cstddef>

#include "core/dtype.h"

// How far results may lie from a reference in f64, or from those of another library: from types and the
// lengths of sums, and from nothing that was measured. tests/python/support/rounding.py is the same for the
// tests in Python.
namespace sluice::test {

// A result that is rounded once is off by at most this share of its size.
inline double unit_roundoff(Dtype type) {
  return type == Dtype::kBf16 ? 0x1p-8 : type == Dtype::kF16 ? 0x1p-11 : 0x1p-24;
}

// A sum of n terms in f32, taken in any order, is off by at most of_sum(n) times the sum of the terms' sizes,
// where each term was rounded once before (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd
// edition, section 4.2).
inline double of_sum(std::size_t terms) {
  const double roundings = static_cast<double>(terms) + 1, share = roundings * 0x1p-24;
  return share / (1 - share);
}

// As many roundings one after the other, which are independent of each other and of either sign: relative to
// the norm of what is rounded, of which they are one standard deviation at the most (Higham and Mary, "A new
// approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41, 2019).
inline double of_roundings(double count, Dtype type = Dtype::kF32) {
  return unit_roundoff(type) * std::sqrt(count);
}

}  // namespace sluice::test
