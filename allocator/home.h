#pragma once
#include <string>
#include <vector>

#include "allocator/address_space.h"
#include "allocator/memory.h"
#include "core/bytes.h"

// Private to this room.
namespace sluice::allocator {

// Extents that follow each other in their pool.
struct ExtentRun {
  std::size_t first = 0;
  std::size_t count = 0;
};

inline constexpr std::size_t kLargestExtent =
    64 * kMiB;  // so that the last extent of a home fits its reservation

struct Home::State {
  std::string name;
  std::size_t size;
  Reservation range;
  FramePool* pool = nullptr;  // whose extents are placed, nullptr where none are
  Purpose purpose = Purpose::kParameter;
  std::vector<ExtentRun> runs;  // in the order of the home's addresses
  std::size_t placed = 0;       // bytes
};

}  // namespace sluice::allocator
