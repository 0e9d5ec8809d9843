#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "engine/plan/plan.h"

namespace sluice::engine {

// How far ahead frames reach: accesses fetched ahead, and whether room is left for what is being written
// behind.
struct Lookahead {
  std::size_t prefetch = 2;
  bool slack = true;
  std::size_t ahead() const { return prefetch + (slack ? 1 : 0); }
};

// The same of some numbers that follow each other.
struct Range {
  std::size_t first = 0, count = 0;
  std::uint64_t each = 0;
};

// Numbers of which ranges are lowered, and the largest of them, which is looked for in blocks that changed.
class Maximum {
 public:
  explicit Maximum(std::size_t count = 0);
  void raise(const std::vector<Range>& ranges) { add(ranges, 1); }
  void lower(const std::vector<Range>& ranges) { add(ranges, -1); }
  std::uint64_t most();  // 0 where there are none
  std::uint64_t most_if_lower(const std::vector<Range>& ranges);

 private:
  struct Block {
    std::uint64_t most = 0;
    std::size_t count = 0;  // that are as large
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
  // known: whatever a number may be, ascending, each once.
  LargestFew(std::vector<std::uint64_t> known, std::size_t few);
  void insert(std::uint64_t value) { count(value, 1); }
  void replace(std::uint64_t value, std::uint64_t by);
  std::uint64_t sum() const;

 private:
  void count(std::uint64_t value, std::int64_t more);

  std::vector<std::uint64_t> known_;
  std::size_t few_;
  std::vector<std::int64_t> counts_;  // Fenwick's tree, the largest first
  std::vector<std::uint64_t> sums_;   // likewise
};

// What each part of each unit takes of frames while it is not resident, and when in a step.
struct FrameNeeds {
  FrameNeeds(const Profile& profile, const Layout& layout, const std::vector<int>& uses,
             const std::vector<bool>& together, const Lookahead& lookahead);

  std::size_t window = 0;  // accesses whose frames there are, or units
  // In order: of the windows, by the access that each begins with; and of the passes over units that are
  // updated together, since of the siblings of a unit that is needed none may be near.
  std::size_t windows = 0;
  std::array<std::vector<std::vector<Range>>, 2> in_windows;  // by part, of parameters and gradient, and unit
  std::vector<std::vector<Range>> in_passes;                  // by unit, of its parameters
  // In any order the largest units may be the ones that meet.
  bool any_order = false;
  std::array<std::vector<std::uint64_t>, 2> extents;  // likewise
};

// How many frames a plan needs, while parts become resident one after another.
class Frames {
 public:
  Frames(const FrameNeeds& needs, const std::vector<UnitPlan>& units);
  std::size_t bound() const { return bound_; }  // at least most(), and known already
  std::size_t most();
  std::size_t most_without(UnitId unit, Part part);  // as if that were resident
  void remove(UnitId unit, Part part);               // it is

 private:
  std::uint64_t of(UnitId unit) const;

  const FrameNeeds* needs_;
  Maximum windows_, passes_;
  std::array<std::vector<bool>, 2> resident_;  // in any order
  LargestFew largest_;
  std::size_t bound_ = 0;
};

}  // namespace sluice::engine
