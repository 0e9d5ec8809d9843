#pragma once
#include <span>

#include "models/families/family.h"

namespace sluice::models {

// All that there are.
std::span<const Family* const> families();

}  // namespace sluice::models
