#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
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

// Pairwise summation of values as they come: neighbours are added first, and an odd last one is carried. The
// partial sums are a binary counter.
template <class T>
class PairwiseSum {
 public:
  void add(T value) {
    for (std::size_t bits = count_++; bits & 1; bits >>= 1) value = sums_[--size_] + value;
    sums_[size_++] = value;
  }
  T total() const {
    if (size_ == 0) return T{0};
    T total = sums_[size_ - 1];
    for (std::size_t i = size_ - 1; i-- > 0;) total = sums_[i] + total;
    return total;
  }

 private:
  T sums_[64];
  std::size_t size_ = 0;
  std::size_t count_ = 0;
};

template <class T>
T pairwise_sum(std::span<const T> values) {
  PairwiseSum<T> sum;
  for (const T value : values) sum.add(value);
  return sum.total();
}

}  // namespace sluice
