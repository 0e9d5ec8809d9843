#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/machine/tools.h"
#include "engine/plan/plan.h"
#include "models/families/config.h"
#include "models/model/model.h"
#include "models/run/loss_scale.h"
#include "models/run/metrics.h"
#include "models/run/trainer.h"
#include "models/run/training_data.h"
#include "optim/optimizer.h"

namespace sluice::models {

inline constexpr std::size_t kTraceEvents = 100'000;
std::size_t trace_events(const TrainSettings& settings);  // that are kept, for --trace and --profile

// Settings that contradict themselves: Error(kInvalidArgument) that names the setting.
void check_settings(const TrainSettings& settings);

// How losses are scaled. Throws Error(kInvalidArgument) for settings that are none, or that do not go
// together.
LossScale loss_scale_of(const TrainSettings& settings);

// How many checkpoints there can be at once: the newest and the best are kept while another one is written.
std::uint64_t most_checkpoints(const TrainSettings& settings);

// Finds before any work what could not be written at the end: --metrics, --trace and --profile that cannot be
// made, that would replace something else, or an input of the run. Leaves nothing. Throws
// Error(kInvalidArgument).
void check_outputs(const TrainSettings& settings);

std::size_t default_length(const ModelConfig& config);

// Everything that is known of a run before its memory is taken.
struct Setup {
  TrainSettings settings;  // nothing left open but what plan.recipe says
  ModelConfig config;
  bool first_values = true;  // else the weights of a folder
  std::unique_ptr<optim::Optimizer> optimizer;
  std::unique_ptr<engine::Tools> tools;
  std::unique_ptr<Model> model;
  std::unique_ptr<TrainingData> data;
  PlanResult plan;
};
Setup prepare(const TrainSettings& settings);

// Parts of it. With what the run learns.
void choose_recipe(PlanResult& plan, const TrainSettings& settings, const Model& model);
// Sizes of checkpoints and of what is written about the run.
void add_file_sizes(PlanResult& plan, const TrainSettings& settings, const Model& model,
                    const optim::Optimizer& optimizer);
// The plan itself, within plan.budget, at plan.rates. cores: of the machine.
void fit(PlanResult& plan, const TrainSettings& settings, const optim::Optimizer& optimizer, int cores);

}  // namespace sluice::models
