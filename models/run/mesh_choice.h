#pragma once
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "comm/mesh.h"
#include "kernels/matrix.h"
#include "models/families/config.h"
#include "models/run/trainer.h"
#include "optim/optimizer.h"

// `--mesh auto`: chooses the simplest of the meshes whose plans have nearly the shortest step (decision 66).
namespace sluice::models {

// Returns the meshes of `ranks` ranks, the simplest first: those with fewer ranks along "tensor", then
// "sequence", then "pipeline". With several hosts there is also each mesh with the axis "pipeline" before
// "data", where the neighbouring ranks, which may share a host, are those along "data".
std::vector<comm::Mesh> meshes_of(int ranks, bool on_several_hosts);

// The inputs of a plan, beside its mesh, before a run has begun. All of them outlive the plan.
struct PlanBasis {
  const ModelConfig& config;
  const optim::Optimizer& optimizer;
  const kernels::MatrixLibrary& library;
  const PlanResult& known;  // rates, budget, recipe, and sizes of files
  int cores;                // of the machine
  // Whether the budget's base already counts the tokens of a step. If not they are added, since their number
  // on a rank depends on the mesh.
  bool counts_tokens = true;
  std::function<void()> report_work = {};  // if not null, called before each plan, since ranks wait
};

// Plans on settings.mesh. REQUIRES: the settings leave nothing open. Returns nothing where no step can be
// found that is shorter than `longest`. Throws as plan_training().
std::optional<PlanResult> plan_on_mesh(const PlanBasis& basis, const TrainSettings& settings,
                                       double longest = std::numeric_limits<double>::infinity());

// Returns, for settings.ranks.size ranks, the mesh with the shortest step among those that fit; of meshes
// within a tenth of it, the simplest. Throws Error(kBudget) where none fits, with the mesh that lacks least,
// and Error(kInvalidArgument) where none is possible.
MeshChoice choose_mesh(const PlanBasis& basis, const TrainSettings& settings);

// Describe the choice for people, and for programs.
std::string to_text(const MeshChoice& choice);
Json to_json(const MeshChoice& choice);

}  // namespace sluice::models
