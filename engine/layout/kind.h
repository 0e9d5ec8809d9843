#pragma once
#include "engine/layout/layout.h"
#include "optim/optimizer.h"

namespace sluice::engine {

inline optim::Kind kind_of(const ParameterSpec& spec) { return {spec.shape, spec.by_elements}; }

}  // namespace sluice::engine
