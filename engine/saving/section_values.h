#pragma once
#include <vector>

#include "comm/communicator.h"
#include "engine/layout/section.h"
#include "engine/plan/plan.h"
#include "engine/steps/engine.h"
#include "optim/optimizer.h"

namespace sluice::engine {

// The section of a model that an engine has, and how the model's units are partitioned.
struct SectionOfFiles {
  const Section& section;
  std::vector<Partition> partitions;  // by unit of the model, with the ranks
};

// How the model's units are partitioned: each rank reports its section's, by its plan. `ranks` are all, with
// any number of them for each section. Collective.
std::vector<Partition> partitions_of(const Layout& model, const optim::Optimizer& optimizer,
                                     const Section& section, const Plan& plan, comm::Communicator& ranks);

// The same source, or sink, for the engine of a section, whose parameters have other numbers. The section
// outlives it.
UnitSource of_section(UnitSource of_model, const Section& section);
UnitSink of_section(UnitSink of_model, const Section& section);

}  // namespace sluice::engine
