#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "engine/layout/layout.h"
#include "engine/steps/engine.h"

// Private to this room.
namespace sluice::engine {

// A rank's report of a step, in which all ranks must agree.
struct StepOfRank {
  std::uint64_t step = 0;            // its number
  std::vector<std::uint32_t> edits;  // by unit: how often its values were edited; empty: not reported
  std::string settings;              // with which it steps, as text_of(); empty: not reported
};

std::string text_of(const StepSettings& settings);

// Throws a Refusal that names two ranks whose reports differ.
void require_alike(const Layout& layout, const std::vector<StepOfRank>& ranks);

}  // namespace sluice::engine
