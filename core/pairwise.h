#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace sluice {

// The order in which numbers 0, 1, ... are added pairwise: neighbours first, and an odd last one is carried
// up (docs/architecture.md, section 9). Sums are on a stack. This class knows of each how many numbers it
// has, and says when the two topmost become one; the caller has the sums themselves. A stack may begin with
// any number: what is left on it are the largest sums of the order that lie within its numbers. Pushed one
// after another onto the stack of all numbers, these give the same order, whoever has which numbers. Thread
// rule: one thread at a time.
class PairwiseStack {
 public:
  explicit PairwiseStack(std::size_t first = 0) : end_(first) {}

  // Pushes the next number, or the sum of the next 2^level. Returns how often the two topmost sums then
  // become one, the lower one plus the upper one. REQUIRES: 2^level divides the index of the first of them.
  std::size_t push(std::uint8_t level = 0) {
    end_ += std::size_t{1} << level;
    levels_.push_back(level);
    std::size_t merges = 0;
    // The sum of the two is one of the order where it begins at a multiple of its size.
    while (levels_.size() > 1 && levels_.back() == levels_[levels_.size() - 2] &&
           end_ % (std::size_t{2} << levels_.back()) == 0) {
      levels_.pop_back();
      ++levels_.back();
      ++merges;
    }
    return merges;
  }
  // Once all numbers were pushed: how often the two topmost sums become one until one is left.
  std::size_t carries() const { return levels_.empty() ? 0 : levels_.size() - 1; }

  std::size_t end() const { return end_; }  // the next number
  std::size_t height() const { return levels_.size(); }
  // The sums on the stack, the lowest one first: each has 2^level numbers.
  const std::vector<std::uint8_t>& levels() const { return levels_; }

 private:
  std::size_t end_;
  std::vector<std::uint8_t> levels_;
};

}  // namespace sluice
