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

// `--mesh auto`: a run gets the simplest of the meshes whose plans have about the shortest step (decision
// 66).
namespace sluice::models {

// The meshes of so many ranks, the simplest first: those with fewer ranks along "tensor", then "sequence",
// then "pipeline". On several hosts pipelines also come before data, as their ranks are then neighbours
// otherwise.
std::vector<comm::Mesh> meshes_of(int ranks, bool on_several_hosts);

// What the plan of a run that has not begun follows from, beside its mesh. All of it outlives the plan.
struct PlanBasis {
  const ModelConfig& config;
  const optim::Optimizer& optimizer;
  const kernels::MatrixLibrary& library;
  const PlanResult& known;  // rates, budget, recipe, and sizes of files
  int cores;                // that the machine has
  // Whether the budget counts what else is there. Else the tokens of a step are added, of which ranks of one
  // mesh have more than those of another.
  bool counts_tokens = true;
  std::function<void()> report_work = {};  // if not null, is called before each plan, for which ranks wait
};

// Plans on settings.mesh. Nothing is left open in the settings. Returns nothing where no step is found that
// is shorter than `longest`, or can be. Throws what plan_training() does.
std::optional<PlanResult> plan_on_mesh(const PlanBasis& basis, const TrainSettings& settings,
                                       double longest = std::numeric_limits<double>::infinity());

// Returns the mesh of settings.ranks.size ranks whose step is the shortest of those that fit; of steps within
// a tenth of it, that of the simplest mesh. Throws Error(kBudget) where none fits, with the one that
// lacks least, and Error(kInvalidArgument) where none is possible.
MeshChoice choose_mesh(const PlanBasis& basis, const TrainSettings& settings);

// For people, and for programs.
std::string to_text(const MeshChoice& choice);
Json to_json(const MeshChoice& choice);

}  // namespace sluice::models
