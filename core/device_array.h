#pragma once
#include <cstdint>

#include "core/dtype.h"
#include "core/error.h"

namespace sluice {

// A GPU has a fault where an address is no multiple of the size of what is there.
inline void check_alignment(const ConstArray& array) {
  ensure(reinterpret_cast<std::uintptr_t>(array.data) % size_of(array.type) == 0,
         "an array of {} for a GPU begins at an address that is no multiple of {}", name_of(array.type),
         size_of(array.type));
}

}  // namespace sluice
