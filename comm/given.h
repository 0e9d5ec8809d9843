#pragma once
#include <cstddef>
#include <functional>
#include <span>
#include <utility>
#include <vector>

namespace sluice::comm {

// Consecutive elements of an array: begin ... end - 1.
struct Run {
  std::size_t begin = 0, end = 0;
  std::size_t size() const { return end - begin; }
  bool operator==(const Run&) const = default;
};
// `count` runs of `size` elements each, which begin `stride` elements apart.
struct Runs {
  std::size_t first = 0, size = 0, stride = 0, count = 1;
};

// The elements of its arrays that each rank contributes to a sum. An element that a rank does not give counts
// as -0, which changes no sum, and is neither read nor sent. An element that no rank gives keeps its value.
// Immutable; any thread.
class Given {
 public:
  using OfRank = std::vector<Runs>;  // they do not overlap
  explicit Given(std::vector<OfRank> by_rank) : by_rank_(std::move(by_rank)) {}

  const std::vector<OfRank>& by_rank() const { return by_rank_; }
  // Returns the elements that the rank gives among these: ascending runs with gaps between them, counted from
  // the first of `elements`. count() returns how many there are.
  std::vector<Run> within(int rank, Run elements) const;
  std::size_t count(int rank, Run elements) const;

 private:
  std::vector<OfRank> by_rank_;
};

// Compacts the array: moves these runs of elements of `element_bytes` each to its front.
void move_together(std::span<const Run> runs, std::size_t element_bytes, std::byte* array);

// Runs of an array, whose data are in their places or packed one after the other.
struct RunsOfArray {
  const std::byte* data;
  std::vector<Run> runs;
  bool in_place;
};
// Cuts the union of all arrays' runs so that each array has each piece wholly or not at all. Calls take() for
// each piece with the address of its data in each array; null: the array does not have it.
using TakeRun = std::function<void(Run run, std::span<const std::byte* const> arrays)>;
void for_each_run(std::span<const RunsOfArray> arrays, std::size_t element_bytes, const TakeRun& take);

}  // namespace sluice::comm
