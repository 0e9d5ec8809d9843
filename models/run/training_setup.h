#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint.h"
#include "engine/machine/machine.h"
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
std::size_t trace_events(const TrainSettings& settings);  // the number kept for --trace and --profile

// Throws Error(kInvalidArgument), with the setting's name, for invalid or contradictory settings.
void check_settings(const TrainSettings& settings);
// Makes the checks that depend on the mesh, once that is chosen.
void check_mesh(const TrainSettings& settings);

// Returns the loss scale. Throws Error(kInvalidArgument) for invalid or contradictory settings.
LossScale loss_scale_of(const TrainSettings& settings);

// Returns the most checkpoints that exist at once: the newest and the best are kept while another one is
// written.
std::uint64_t most_checkpoints(const TrainSettings& settings);

// Throws Error(kInvalidArgument) where --metrics, --trace or --profile could not be written at the end of the
// run, or would replace another file or an input. Leaves no file behind.
void check_outputs(const TrainSettings& settings);

// Sets the number of pieces that a reproducible run cuts layers into: as many as there are key/value heads,
// up to 4, for any number of ranks. Checks that the mesh's ranks can share out these, and those of sequences.
void settle_grain(TrainSettings& settings, const ModelConfig& config);

// Adds to the rates the CPU time that receiving bytes from other ranks takes, on a machine with `cores`
// cores.
void count_transport(const TrainSettings& settings, int cores, engine::MachineRates& rates);

// Everything that is known of a run before it allocates memory.
struct Setup {
  TrainSettings settings;  // complete, except for what plan.recipe has
  ModelConfig config;
  bool first_values = true;          // false: weights of a folder
  std::uint64_t learned_length = 0;  // see LearnedFrom
  std::unique_ptr<optim::Optimizer> optimizer;
  std::unique_ptr<engine::Tools> tools;
  std::unique_ptr<Model> model;
  std::unique_ptr<engine::Layout> layout;  // of the model
  std::unique_ptr<TrainingData> data;      // null: only a plan is made, without data
  PlanResult plan;
  // The section of the model that this rank has, where the model is cut into sections. Null: it has the whole
  // model.
  std::unique_ptr<Model> section_model;
  std::unique_ptr<engine::Section> section;
  std::unique_ptr<engine::SectionOfFiles> files;
  const Model& own_model() const { return section_model ? *section_model : *model; }
};
Setup prepare(const TrainSettings& settings);
// The beginning of prepare(): what depends neither on the mesh nor on the machine's speed. The model is whole
// where the mesh is yet to be chosen. there: another machine, for which is planned, without data, outputs and
// disks.
Setup begin_setup(const TrainSettings& settings, const engine::Machine* there = nullptr);

// Returns the files that checkpoints copy from the model's folder, as they are now: those of the tokenizer
// and for generation, by transformers' names. A preset has none.
std::vector<engine::OwnFile> copied_files(const std::string& model);

// Makes the plan's request, and the plan itself, within plan.budget, with plan.rates. cores: of the machine.
void fit(PlanResult& plan, const TrainSettings& settings, const optim::Optimizer& optimizer, int cores);
void set_request(PlanResult& plan, const TrainSettings& settings);

}  // namespace sluice::models
