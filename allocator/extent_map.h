#pragma once
#include <cstddef>
#include <vector>

#include "allocator/home.h"

// Private to this room.
namespace sluice::allocator {

// Tracks which extents of a pool are free. Thread rule: its owner guards it.
class ExtentMap {
 public:
  explicit ExtentMap(std::size_t extents) : used_(extents), free_(extents) {}

  std::size_t size() const { return used_.size(); }
  std::size_t free() const { return free_; }

  // Takes `count` extents in as few runs as possible, from the shortest free runs that allow it (best fit),
  // so that longer runs stay whole. REQUIRES: count <= free()
  std::vector<ExtentRun> take(std::size_t count);
  void give_back(ExtentRun run);

 private:
  std::vector<ExtentRun> free_runs() const;
  void mark(ExtentRun run, bool used);

  std::vector<bool> used_;
  std::size_t free_;
};

}  // namespace sluice::allocator
