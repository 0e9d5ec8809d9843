#pragma once
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/threads.h"
#include "engine/plan/plan.h"
#include "kernels/matrix.h"
#include "models/families/config.h"
#include "models/model/model.h"
#include "models/run/loss_scale.h"
#include "models/run/metrics.h"
#include "models/run/trainer.h"
#include "models/run/training_data.h"
#include "offload/file.h"
#include "optim/optimizer.h"

namespace sluice::models {

// What the process takes beyond what it holds before the engine begins and what the plan places: stacks of
// threads, small objects, the system's tables.
inline constexpr std::uint64_t kReserve = std::uint64_t{8} << 20;
// What the process counts as in a plan, where it holds `held` bytes with its reserve before the engine
// begins: no measurement, which differs by some KiB from run to run, but a stated figure that is more; where
// it is not (much data, other libraries), `held` in whole steps of 4 MiB. So a plan and the run that follows
// it count the same.
std::uint64_t process_bytes(std::uint64_t held, int threads);
inline constexpr std::size_t kTraceEvents = 100'000;
inline constexpr std::uint64_t kTraceEventBytes = 160;
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

// What this process may use where the settings leave it open: memory, threads, room of disk folders.
std::uint64_t default_memory();
int default_threads();
// Gives folders without a limit what is free there, less `reserved` bytes on the file system of `out`. Throws
// Error(kNotFound) for a missing folder, Error(kInvalidArgument) for one that is on no disk, Error(kBudget)
// for a limit beyond what is free.
void resolve_disk(std::vector<offload::DiskFolder>& disk, const std::string& out, std::uint64_t reserved);
std::uint64_t usable_disk(const std::vector<offload::DiskFolder>& disk);  // striped evenly
std::size_t default_length(const ModelConfig& config);

// The tools of a run, made before anything large is taken.
struct Tools {
  Tools(int thread_count, const offload::IoOptions& how);
  Threads threads;
  std::unique_ptr<kernels::MatrixLibrary> library;
  offload::IoOptions disk_options;  // of io
  std::unique_ptr<offload::IoService> io;
  // What the process holds once all of them are warm, with the reserve.
  std::uint64_t base() const;
};

// Everything that is known of a run before its memory is taken.
struct Setup {
  TrainSettings settings;  // nothing left open but what plan.recipe says
  ModelConfig config;
  bool first_values = true;  // else the weights of a folder
  std::unique_ptr<optim::Optimizer> optimizer;
  std::unique_ptr<Tools> tools;
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
// The plan itself, within plan.budget. cores: of the machine.
void fit(PlanResult& plan, const TrainSettings& settings, const optim::Optimizer& optimizer,
         const engine::MachineRates& rates, int cores);

// With the defaults of training, where they are other than the optimizer's own.
std::unique_ptr<optim::Optimizer> make_training_optimizer(const optim::OptimizerSettings& settings);

}  // namespace sluice::models
