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

// Sets the plan of this rank's section, within plan.budget, at plan.rates, and what is known of the others.
// All ranks take rank 0's cut, and items of the size with which the step of all of them is predicted to be
// shortest. A run that is only planned has all sections' plans made here, and gets that of the first. Returns
// the section's model. Throws what make_plan() does, on all ranks alike, with the section that it is of.
// Collective. longest: where a run is only planned, null is returned where no step is found that is shorter,
// or can be.
std::unique_ptr<Model> plan_section(PlanResult& plan, const TrainSettings& settings, const Model& model,
                                    const optim::Optimizer& optimizer, const kernels::MatrixLibrary& library,
                                    RunRanks& ranks,
                                    double longest = std::numeric_limits<double>::infinity());

// For people, and for programs.
std::string to_text(const PipelinePlan& pipeline, const engine::Profile& profile);
Json to_json(const PipelinePlan& pipeline);

}  // namespace sluice::models
