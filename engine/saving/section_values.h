#pragma once
#include "engine/layout/section.h"
#include "engine/steps/engine.h"

namespace sluice::engine {

// The same source, or sink, for the engine of a section, whose parameters have other numbers. The section
// outlives it.
UnitSource of_section(UnitSource of_model, const Section& section);
UnitSink of_section(UnitSink of_model, const Section& section);

}  // namespace sluice::engine
