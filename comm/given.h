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
// So many runs of `size` elements, which begin `stride` apart.
struct Runs {
  std::size_t first = 0, size = 0, stride = 0, count = 1;
};

// Which elements of its arrays each rank gives to a sum. What it does not give counts as -0, which changes no
// sum, and is neither read nor sent. What nobody gives stays as it is. Immutable; any thread.
class Given {
 public:
  using OfRank = std::vector<Runs>;  // which do not overlap
  explicit Given(std::vector<OfRank> by_rank) : by_rank_(std::move(by_rank)) {}

  const std::vector<OfRank>& by_rank() const { return by_rank_; }
  // What the rank gives of these elements: ascending runs with gaps between them, counted from the first of
  // the elements; and how much that is.
  std::vector<Run> within(int rank, Run elements) const;
  std::size_t count(int rank, Run elements) const;

 private:
  std::vector<OfRank> by_rank_;
};

// Moves these runs of an array, whose elements have so many bytes, together to its front.
void move_together(std::span<const Run> runs, std::size_t element_bytes, std::byte* array);

// These runs of an array: in their places, or one after the other.
struct RunsOfArray {
  const std::byte* data;
  std::vector<Run> runs;
  bool in_place;
};
// Cuts what any of the arrays has into runs of which each has all or nothing, and calls take() with each of
// them, and with where each array has it; null: it does not.
using TakeRun = std::function<void(Run run, std::span<const std::byte* const> arrays)>;
void for_each_run(std::span<const RunsOfArray> arrays, std::size_t element_bytes, const TakeRun& take);

}  // namespace sluice::comm
