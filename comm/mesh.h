#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace sluice::comm {

// The ranks of a run on named axes, as in "data=2,pipeline=4". Ranks that follow each other differ in the
// last axis. Immutable; any thread.
class Mesh {
 public:
  struct Axis {
    std::string name;
    int size = 1;
    bool operator==(const Axis&) const = default;
  };
  static constexpr int kMostRanks = 1 << 20;

  // Throws Error(kInvalidArgument) for an axis that is not known (data, pipeline, tensor, sequence), is there
  // twice, or has no size of 1 or more, and for more than kMostRanks ranks.
  static Mesh parse(std::string_view text);

  std::string text() const;               // as parse() reads it
  int ranks() const { return ranks_; }    // the product of the sizes
  int size(std::string_view axis) const;  // 1 where there is no such axis
  int coordinate(int rank, std::string_view axis) const;
  // The ranks that differ from `rank` in this axis alone, and itself, by their coordinates.
  std::vector<int> along(int rank, std::string_view axis) const;
  // The ranks that have the same coordinate on this axis as `rank`, ascending.
  std::vector<int> across(int rank, std::string_view axis) const;
  std::string place(int rank) const;  // in words: "data 1 of 2, pipeline stage 3 of 4"
  bool operator==(const Mesh&) const = default;

 private:
  // How far ranks are apart whose coordinates differ by one.
  int step(std::string_view axis) const;

  std::vector<Axis> axes_;
  int ranks_ = 1;
};

}  // namespace sluice::comm
