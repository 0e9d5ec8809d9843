#pragma once
#include <cstdint>
#include <string_view>

#include "core/bytes.h"
#include "core/dtype.h"
#include "core/error.h"

namespace sluice {

// A GPU faults at an address that is not a multiple of the element's size.
inline void check_alignment(const void* address, std::size_t element_bytes, std::string_view type) {
  ensure(reinterpret_cast<std::uintptr_t>(address) % element_bytes == 0,
         "an array of {} for a GPU begins at an address that is no multiple of {}", type, element_bytes);
}
inline void check_alignment(const ConstArray& array) {
  check_alignment(array.data, size_of(array.type), name_of(array.type));
}

// Returns the grid size, in thread blocks, of a launch over `elements`, of which each block handles
// elements_of_block.
inline unsigned launch_blocks(std::size_t elements, std::size_t elements_of_block) {
  const std::size_t blocks = divide_up(elements, elements_of_block);
  ensure(blocks <= INT32_MAX, "a launch for {} elements, {} in each block, is more than a GPU takes at once",
         elements, elements_of_block);
  return static_cast<unsigned>(blocks);
}

}  // namespace sluice
