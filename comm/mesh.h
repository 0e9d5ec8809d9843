#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace sluice::comm {

// The ranks of a run arranged on named axes, as in "data=2,pipeline=4". Consecutive ranks differ in the last
// axis. Immutable; any thread.
class Mesh {
 public:
  struct Axis {
    std::string name;
    int size = 1;
    bool operator==(const Axis&) const = default;
  };
  static constexpr int kMostRanks = 1 << 20;

  // Throws Error(kInvalidArgument) for an unknown axis (known: data, pipeline, tensor, sequence), one that is
  // named twice or has a size below 1, and for more than kMostRanks ranks.
  static Mesh parse(std::string_view text);

  std::string text() const;               // in the format that parse() reads
  int ranks() const { return ranks_; }    // the product of the sizes
  int size(std::string_view axis) const;  // 1 for an absent axis
  int coordinate(int rank, std::string_view axis) const;
  // Returns `rank` and the ranks that differ from it in this axis alone, ordered by their coordinates.
  std::vector<int> along(int rank, std::string_view axis) const;
  // Returns the ranks with the same coordinate as `rank` on this axis, ascending.
  std::vector<int> across(int rank, std::string_view axis) const;
  std::string place(int rank) const;  // in words: "data 1 of 2, pipeline stage 3 of 4"
  bool operator==(const Mesh&) const = default;

 private:
  // The difference in rank number between neighbours on this axis.
  int step(std::string_view axis) const;

  std::vector<Axis> axes_;
  int ranks_ = 1;
};

}  // namespace sluice::comm
