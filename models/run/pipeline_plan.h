#pragma once
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "engine/plan/cut.h"
#include "engine/plan/pipeline.h"
#include "kernels/matrix.h"
#include "models/model/model.h"
#include "models/run/mesh_links.h"
#include "models/run/run_ranks.h"
#include "models/run/trainer.h"
#include "optim/optimizer.h"

namespace sluice::models {

// Makes the plan of this rank's section, within plan.budget, with plan.rates, and records the other sections'
// plans as far as known. All ranks use rank 0's cut, and the size of items with the shortest predicted step.
// For a run that is only planned, all sections' plans are made here, and the result has the first one's.
// Returns the section's model. Throws as make_plan(), on all ranks alike, with the section's number.
// Collective. longest: for a run that is only planned, returns null where no step can be found that is
// shorter.
std::unique_ptr<Model> plan_section(PlanResult& plan, const TrainSettings& settings, const Model& model,
                                    const optim::Optimizer& optimizer, const kernels::MatrixLibrary& library,
                                    RunRanks& ranks,
                                    double longest = std::numeric_limits<double>::infinity());

// Describe the pipeline for people, and for programs.
std::string to_text(const PipelinePlan& pipeline, const engine::Profile& profile);
Json to_json(const PipelinePlan& pipeline);

}  // namespace sluice::models
