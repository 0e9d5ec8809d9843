#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sluice {

// Pairwise summation of numbers 0, 1, ... (docs/architecture.md, section 9): neighbours are added first, and
// an odd last one is carried up. Partial sums are on a stack. This class keeps only how many numbers each
// partial sum covers, and tells when the two topmost are to be added; the caller holds the sums.
//
// A stack may begin at any number. The sums left on it are the largest subtrees of the summation that lie
// within its numbers. Pushed in order onto the stack of all numbers, they give the same sum, however the
// numbers were distributed. Thread rule: one thread at a time.
class PairwiseStack {
 public:
  explicit PairwiseStack(std::size_t first = 0) : end_(first) {}

  // Pushes the next number, or the sum of the next 2^level numbers. Returns how many additions follow, each
  // of the two topmost sums, lower plus upper. REQUIRES: 2^level divides the index of the first pushed
  // number.
  std::size_t push(std::uint8_t level = 0) {
    end_ += std::size_t{1} << level;
    levels_.push_back(level);
    std::size_t merges = 0;
    // Two sums merge only where the result begins at a multiple of its size, as every subtree does.
    while (levels_.size() > 1 && levels_.back() == levels_[levels_.size() - 2] &&
           end_ % (std::size_t{2} << levels_.back()) == 0) {
      levels_.pop_back();
      ++levels_.back();
      ++merges;
    }
    return merges;
  }
  // Returns the number of additions that remain after the last number was pushed, until one sum is left.
  std::size_t carries() const { return levels_.empty() ? 0 : levels_.size() - 1; }

  std::size_t end() const { return end_; }  // the index of the next number
  std::size_t height() const { return levels_.size(); }
  // The sums on the stack, from the bottom: each covers 2^level numbers.
  const std::vector<std::uint8_t>& levels() const { return levels_; }

 private:
  std::size_t end_;
  std::vector<std::uint8_t> levels_;
};

// Returns the pairwise sum of all these numbers. REQUIRES: there are some.
inline double pairwise_sum(std::vector<double> values) {
  for (std::size_t count = values.size(); count > 1; count = (count + 1) / 2)
    for (std::size_t i = 0; i < count; i += 2)
      values[i / 2] = i + 1 < count ? values[i] + values[i + 1] : values[i];
  return values.front();
}

}  // namespace sluice
