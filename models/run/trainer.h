#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/mesh.h"
#include "core/json.h"
#include "engine/checkpoint/best_checkpoint.h"
#include "engine/plan/pipeline.h"
#include "engine/steps/assembly.h"
#include "models/families/config.h"
#include "offload/records.h"
#include "optim/optimizer.h"

namespace sluice::models {

// The settings of `sluice train` and sluice.train(...). Defaults are the command line's.
struct TrainSettings {
  std::string model;                      // preset or folder
  std::vector<std::string> data;          // files and folders; a plan needs none
  std::string tokens = "auto";            // "bytes": the 256 bytes replace a preset's vocabulary
  std::optional<std::string> validation;  // files; nothing: a held-out part of the data
  double held_out = 0.05;    // share of the data set apart for validation where no file is named; 0: none
  std::uint64_t memory = 0;  // bytes for the whole process; 0: all that is free
  std::vector<offload::DiskFolder> disk;
  Dtype dtype = Dtype::kF32;
  std::size_t batch = 4, accumulate = 1, length = 0;  // length 0: the model's context, at most 1024
  std::uint64_t steps = 100;
  // The learning recipe; models/run/recipe.h chooses values that are not given.
  std::optional<double> learning_rate;
  std::optional<double> adamw_learning_rate;  // for the parameters that Muon leaves to AdamW
  std::optional<std::uint64_t> warmup;
  std::optional<std::string> schedule;        // constant, cosine, linear
  std::optional<double> final_learning_rate;  // as a share of learning_rate, for cosine and linear
  std::optional<double> weight_decay, clip;   // clip 0: none
  double clip_value = 0;                      // 0: none
  // Defaults here: beta2 = 0.95 for Adam, AdamW and Muon's AdamW; Muon's scale is match_rms_adamw.
  optim::OptimizerSettings optimizer;
  // "dynamic", or a number; nothing: dynamic for f16, else 1. The two below are a dynamic scale's initial
  // value and the number of applied steps before it grows; nothing: LossScale's.
  std::optional<std::string> loss_scale;
  std::optional<double> initial_scale;
  std::optional<std::size_t> scale_growth_interval;
  std::uint64_t seed = 1;
  std::string out;               // folder of checkpoints; empty: none are written
  std::uint64_t save_every = 0;  // 0: only at the end
  std::uint64_t keep = 2;        // number of newest checkpoints to keep; with validation also the best one
  bool resume = false;
  std::uint64_t eval_every = 0, eval_batches = 8;  // not 0: also whenever a checkpoint is due
  int threads = 0;                                 // 0: all cores that this process may use
  // Files; empty: none. A trace is requested on all ranks or on none, and is one file of rank 0.
  std::string metrics, trace, profile;
  std::string source;        // a file that the settings came from, if any, which outputs must not replace
  engine::PlanRequest plan;  // recompute and the like; its ranks are set from those below
  // The ranks that train the model together; `ranks` identifies this one. The communicator outlives the run;
  // null: the run has one rank, or is only planned. Sizes, disk space and threads are this rank's;
  // `accumulate` counts the micro-batches of all ranks.
  comm::Communicator* communicator = nullptr;
  engine::RankOf ranks;
  // The parallelism: "pipeline" cuts the model into stages, one for each rank; "tensor" cuts each layer,
  // "sequence" each sequence; along "data" ranks have equal sections. Nothing: each rank has the whole model.
  std::optional<comm::Mesh> mesh;
  bool chooses_mesh = false;  // chosen by plans (mesh_choice.h) instead
  engine::PipelineOrder pipeline = engine::PipelineOrder::k1F1B;
  std::size_t chunks = 1;             // groups of consecutive blocks in each stage
  std::optional<std::string> stages;  // the blocks of each stage, by chunk: "0-7,8-15"; nothing: chosen
  // With plan.reproducible: the number of pieces that layers are cut into, whatever the number of ranks along
  // "tensor".
  std::optional<std::size_t> grain;
  // And the number that sequences are cut into, whatever the number of ranks along "sequence"; nothing: they
  // are whole.
  std::optional<std::size_t> sequence_grain;
  // The connection among ranks. Nothing: it is measured where there are ranks; in a plan before a run,
  // communication takes no time.
  std::optional<engine::Link> link;
  // The connection within a host, where a plan is given it; `link` is then that between hosts. Nothing: as
  // `link` on one host, and otherwise communication within a host takes no time.
  std::optional<engine::Link> host_link;
  // The number of ranks on this rank's machine, and this rank's share of its cores. Memory, threads and disk
  // space that are left open are shared likewise.
  int ranks_here = 1;
  double share_of_cores = 1;
  std::uint64_t communication_bytes = 0;   // bytes that the process holds for the communicator
  std::uint64_t communication_in_use = 0;  // the part of it that is allocated before the run begins
};

// The report of a step. A skipped step's gradient norm is not finite, and its loss need not be.
struct StepReport {
  std::uint64_t step = 0, steps = 0;
  double loss = 0, learning_rate = 0, gradient_norm = 0, seconds = 0, tokens_per_second = 0;
  std::optional<double> validation_loss;
  std::optional<double> loss_scale;  // nothing where losses are not scaled
  bool skipped = false;
  std::uint64_t memory = 0, peak_memory = 0, predicted_peak = 0, budget = 0;  // resident bytes of the process
  std::uint64_t disk_read = 0, disk_written = 0;                              // bytes of this step
  // Bytes from other ranks since the previous step, and the part of them from other hosts.
  std::uint64_t received = 0, received_from_hosts = 0;
  double read_wait_seconds = 0, write_wait_seconds = 0, rank_wait_seconds = 0, optimizer_seconds = 0;
};

// A checkpoint that was written or read.
struct CheckpointReport {
  std::string folder;
  std::uint64_t bytes = 0;
  double seconds = 0;
  std::vector<std::string> removed = {};            // older ones, removed for --keep after it was written
  std::optional<engine::BestCheckpoint> best = {};  // the run's best by validation, after it was written
};

struct TrainEvents {
  std::function<void(const std::string& plan_table)> planned;
  std::function<void()> begun;  // the model has its initial values, and steps follow
  std::function<void(const StepReport&)> step;
  std::function<void(const CheckpointReport&)> saved, resumed;
  // Gets the JSON of docs/formats/profile.md if settings.profile is set, at the end or after an error.
  std::function<void(const std::string& json)> profiled;
  std::function<bool()> stop;  // polled between ops; true: save at the end of this step, and return
};

struct TrainResult {
  std::uint64_t steps = 0, skipped = 0;  // of the whole run; steps skipped by loss scaling count, too
  std::optional<double> last_loss;       // nothing where no step remained
  std::uint64_t peak_memory = 0, predicted_peak = 0;
  bool stopped = false;                        // true: stop() ended it before the last step
  std::optional<engine::BestCheckpoint> best;  // nothing where no checkpoint was validated
};

// The complete learning recipe of a run.
struct Recipe {
  double learning_rate = 0;
  std::optional<double> adamw_learning_rate;  // nothing: learning_rate
  std::uint64_t warmup = 0;
  std::string schedule;
  double final_learning_rate = 0, clip = 0, weight_decay = 0;
  std::vector<std::string> defaults;  // command-line names of the settings above that took their defaults
};

// How a model is cut into pipeline stages, and what is predicted for them.
struct PipelinePlan {
  engine::Pipeline pipeline;
  std::vector<engine::UnitRange> cut;  // by chunk, in the model's order
  std::vector<engine::UnitRange> units(int section) const;
  std::vector<std::string> names;  // by stage: first and last units of its chunks
  int section = 0;                 // the stage that this plan is for
  engine::PipelineTime time;
  std::vector<std::uint64_t> peaks;  // bytes of host memory
  struct Received {  // bytes that a rank receives in a step: sums and parameters, borders, and within layers
    std::uint64_t data = 0, pipeline = 0, layers = 0;
  };
  std::vector<Received> received;  // by stage
  double bubble() const;           // the fraction of the step that stages spend waiting for others
};

// The chosen mesh, and those that it was compared with, the simplest first.
struct MeshChoice {
  struct Tried {
    comm::Mesh mesh;
    double seconds = 0;      // of a step on all ranks, where it fits
    std::uint64_t peak = 0;  // bytes of host memory of the rank with the most
    double at_least = 0;     // a lower bound for the step's seconds; where that is too long, no plan was made
    std::string why_not;     // why it does not fit, or is not possible
    bool is_possible = true;
    std::uint64_t lacks = 0;  // missing bytes, where it does not fit
    bool fits() const { return peak > 0; }
  };
  comm::Mesh mesh;
  std::vector<Tried> tried;
};

// A plan without a run, as `sluice plan` shows it.
struct PlanResult : engine::Planned {
  std::optional<PipelinePlan> pipeline;
  std::optional<MeshChoice> mesh_choice;  // if the mesh was left open; of a run's ranks, only on the first
  Recipe recipe;
  std::string recipe_text;             // for people, with the model's initial values
  std::uint64_t checkpoint_bytes = 0;  // size of one checkpoint
  std::uint64_t trace_bytes = 0;       // for --trace and --profile; a part of budget.base
  // For a plan of another machine: its description's file, and what that lacks.
  std::string machine;
  std::vector<std::string> not_known;
};
PlanResult plan_training(const TrainSettings& settings);
// Returns the table for people: the plan, the recipe, and the room for checkpoints.
std::string plan_text(const PlanResult& result);

// Throws Error where the settings, or the checkpoints in --out, do not allow the run. Begins nothing.
void check_request(const TrainSettings& settings);

// Makes the checks of check_request(), plans, loads or initializes or resumes, trains, and saves. Throws
// Error.
TrainResult train(const TrainSettings& settings, const TrainEvents& events);

}  // namespace sluice::models
