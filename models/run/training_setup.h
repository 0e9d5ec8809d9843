#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/machine/tools.h"
#include "engine/plan/plan.h"
#include "engine/saving/section_values.h"
#include "models/families/config.h"
#include "models/model/model.h"
#include "models/run/loss_scale.h"
#include "models/run/metrics.h"
#include "models/run/trainer.h"
#include "models/run/training_data.h"
#include "optim/optimizer.h"

namespace sluice::models {

inline constexpr std::size_t kTraceEvents = 100'000;
std::size_t trace_events(const TrainSettings& settings);  // how many are kept for --trace and --profile

// Throws Error(kInvalidArgument) that names the setting where settings are invalid or contradict each other.
void check_settings(const TrainSettings& settings);
// The part of it that depends on the mesh, and follows once that is chosen.
void check_mesh(const TrainSettings& settings);

// How losses are scaled. Throws Error(kInvalidArgument) where settings are invalid or contradict each other.
LossScale loss_scale_of(const TrainSettings& settings);

// How many checkpoints there can be at once: the newest and the best are kept while another one is written.
std::uint64_t most_checkpoints(const TrainSettings& settings);

// Throws Error(kInvalidArgument) for --metrics, --trace and --profile that could not be written at the end of
// the run, or would replace something else or an input of it. Leaves no file behind.
void check_outputs(const TrainSettings& settings);

std::size_t default_length(const ModelConfig& config);

// Settles into how many pieces a reproducible run cuts layers: up to 4, as many as there are key/value heads,
// and at any number of ranks the same.
void settle_grain(TrainSettings& settings, const ModelConfig& config);

// Settle what the settings leave open: this rank's share of the memory that one process of the machine may
// use, and of the machine's cores.
std::uint64_t share_of_memory(std::uint64_t memory, const TrainSettings& settings);
int share_of_cores(int cores, const TrainSettings& settings);
// Counts in the rates what bytes from other ranks take of this one's cores, of which its machine has so many.
void count_transport(const TrainSettings& settings, int cores, engine::MachineRates& rates);

// Everything that is known of a run before its memory is taken.
struct Setup {
  TrainSettings settings;  // nothing is left open but what plan.recipe says
  ModelConfig config;
  bool first_values = true;          // else the weights of a folder
  std::uint64_t learned_length = 0;  // see LearnedFrom
  std::unique_ptr<optim::Optimizer> optimizer;
  std::unique_ptr<engine::Tools> tools;
  std::unique_ptr<Model> model;
  std::unique_ptr<engine::Layout> layout;  // of the model
  std::unique_ptr<TrainingData> data;
  PlanResult plan;
  // Where the model is cut into sections, the one that this rank has. Null: it has the whole model.
  std::unique_ptr<Model> section_model;
  std::unique_ptr<engine::Section> section;
  std::unique_ptr<engine::SectionOfFiles> files;
  const Model& own_model() const { return section_model ? *section_model : *model; }
};
Setup prepare(const TrainSettings& settings);

// What checkpoints have besides of the folder that the model is from, as it is now: the files of its
// tokenizer and for generation, as transformers names them. A preset has none.
std::vector<engine::OwnFile> copied_files(const std::string& model);

// The steps of prepare(). This one sets the recipe.
void choose_recipe(PlanResult& plan, const TrainSettings& settings, const Model& model);
// Sets the sizes of checkpoints and of what is written about the run.
void add_file_sizes(PlanResult& plan, const TrainSettings& settings, const Model& model,
                    const optim::Optimizer& optimizer);
// Sets what the plan is asked for, and the plan itself, within plan.budget, at plan.rates. cores: how many
// the machine has.
void fit(PlanResult& plan, const TrainSettings& settings, const optim::Optimizer& optimizer, int cores);
void set_request(PlanResult& plan, const TrainSettings& settings);

}  // namespace sluice::models
