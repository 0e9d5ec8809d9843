#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "engine/plan/plan.h"

namespace sluice::engine {

// How far ahead the frames of a plan reach: how many accesses are fetched ahead, whether there is room for
// one more, which is being written behind, and for one whose gradient ranks are adding up.
struct Lookahead {
  std::size_t prefetch = 2;
  bool slack = true, sums = false;
  std::size_t ahead() const { return prefetch + (slack ? 1 : 0) + (sums ? 1 : 0); }
};

// The same amount for each of `count` consecutive numbers, from `first` on.
struct Range {
  std::size_t first = 0, count = 0;
  std::uint64_t each = 0;
};

// Numbers that are raised and lowered by ranges, and the largest one, searched in changed blocks only.
class Maximum {
 public:
  explicit Maximum(std::size_t count = 0);
  void raise(const std::vector<Range>& ranges) { add(ranges, 1); }
  void lower(const std::vector<Range>& ranges) { add(ranges, -1); }
  std::uint64_t most();  // 0 where there are no numbers
  std::uint64_t most_if_lower(const std::vector<Range>& ranges);

 private:
  struct Block {
    std::uint64_t most = 0;
    std::size_t count = 0;  // how many are as large
    bool stale = true;
  };
  void add(const std::vector<Range>& ranges, std::int64_t times);
  void refresh();

  std::vector<std::uint64_t> values_;
  std::vector<Block> blocks_;
  Block all_;
};

// Numbers of which the few largest are added up.
class LargestFew {
 public:
  // `known` has every value that a number may have, ascending, each once.
  LargestFew(std::vector<std::uint64_t> known, std::size_t few);
  void insert(std::uint64_t value) { count(value, 1); }
  void replace(std::uint64_t value, std::uint64_t by);
  std::uint64_t sum() const;

 private:
  void count(std::uint64_t value, std::int64_t more);

  std::vector<std::uint64_t> known_;
  std::size_t few_;
  std::vector<std::int64_t> counts_;  // a Fenwick tree, the largest value first
  std::vector<std::uint64_t> sums_;   // a Fenwick tree of the same order
};

// How many frames each part of each unit takes while it is not resident, and when in a step.
struct FrameNeeds {
  // By unit: how many uses there are, how many buffers each of them has, and whether it is updated with
  // others.
  FrameNeeds(const Profile& profile, const Layout& layout, const std::vector<int>& uses,
             const std::vector<std::size_t>& buffers, const std::vector<bool>& together,
             const Lookahead& lookahead, std::size_t extent_bytes);

  std::size_t window = 0;  // how many accesses (in any order: units) have frames at once
  // By a schedule: windows, each named by the access that it begins with; and passes of joint updates, each
  // named by its unit. While a pass needs a unit, the units updated with it need not be near.
  std::size_t windows = 0;
  std::array<std::vector<std::vector<Range>>, 2> in_windows;  // by part (parameters, gradient) and unit
  std::vector<std::vector<Range>> in_passes;                  // by unit, for its parameters
  // In any order: the largest units may be needed at once.
  bool any_order = false;
  std::array<std::vector<std::uint64_t>, 2> extents;  // by part and unit
};

// Counts the frames that a plan needs, while one part after another becomes resident.
class Frames {
 public:
  Frames(const FrameNeeds& needs, const std::vector<UnitPlan>& units);
  std::size_t bound() const { return bound_; }  // the last result of most(); the next is no larger
  std::size_t most();
  std::size_t most_without(UnitId unit, Part part);  // what most() would be if that part were resident
  void remove(UnitId unit, Part part);               // that part becomes resident

 private:
  std::uint64_t of(UnitId unit) const;

  const FrameNeeds* needs_;
  Maximum windows_, passes_;
  std::array<std::vector<bool>, 2> resident_;  // in any order only: by part and unit
  LargestFew largest_;
  std::size_t bound_ = 0;
};

}  // namespace sluice::engine
