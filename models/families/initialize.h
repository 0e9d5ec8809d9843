#pragma once
#include <cstdint>
#include <string>

#include "core/threads.h"
#include "engine/layout/layout.h"
#include "engine/steps/engine.h"
#include "models/families/config.h"

namespace sluice::models {

// Returns the initial values for training from scratch, by the family's rule. An element depends on the seed,
// the parameter's name and its index alone. `layout` and `threads` outlive the source.
engine::UnitSource initial_values(const ModelConfig& config, const engine::Layout& layout, std::uint64_t seed,
                                  Threads& threads);

// Whether a model starts from initial values: a preset, or a folder with config.json and no weights. Throws
// Error(kInvalidArgument) for a folder with weights in an unsupported format ("pytorch_model.bin"), and
// Error(kIo) for an unreadable one.
bool begins_with_first_values(const std::string& model);

}  // namespace sluice::models
