#pragma once
#include <string>
#include <vector>

#include "allocator/address_space.h"
#include "allocator/memory.h"
#include "core/bytes.h"

// Private to this room.
namespace sluice::allocator {

// Extents with consecutive numbers in their pool.
struct ExtentRun {
  std::size_t first = 0;
  std::size_t count = 0;
};

// A home's reserved range is larger than the home by this much, so that its last extent fits.
inline constexpr std::size_t kLargestExtent = 64 * kMiB;

struct Home::State {
  std::string name;
  std::size_t size;
  Reservation range;
  FramePool* pool = nullptr;  // the pool whose extents are placed here, or null
  Purpose purpose = Purpose::kParameter;
  std::vector<ExtentRun> runs;  // in the order of the home's addresses
  std::size_t placed = 0;       // bytes of these extents
};

}  // namespace sluice::allocator
