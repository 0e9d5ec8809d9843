#pragma once
#include <span>

#include "models/families/family.h"

namespace sluice::models {

std::span<const Family* const> families();

}  // namespace sluice::models
