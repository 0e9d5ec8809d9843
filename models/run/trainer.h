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

// What `sluice train` and sluice.train(...) are told. Defaults are the command line's.
struct TrainSettings {
  std::string model;                      // preset or folder
  std::vector<std::string> data;          // files and folders
  std::string tokens = "auto";            // "bytes": a preset's vocabulary is replaced by the 256 bytes
  std::optional<std::string> validation;  // files; nothing: a held-out part of the data
  double held_out = 0.05;    // share of the data kept for validation where none is named; 0: none
  std::uint64_t memory = 0;  // bytes for the whole process; 0: what is free
  std::vector<offload::DiskFolder> disk;
  Dtype dtype = Dtype::kF32;
  std::size_t batch = 4, accumulate = 1, length = 0;  // length 0: the model's context, at most 1024
  std::uint64_t steps = 100;
  // How it learns; what is not given, models/run/recipe.h chooses.
  std::optional<double> learning_rate;
  std::optional<double> adamw_learning_rate;  // of what Muon leaves to AdamW
  std::optional<std::uint64_t> warmup;
  std::optional<std::string> schedule;        // constant, cosine, linear
  std::optional<double> final_learning_rate;  // as a share of learning_rate, for cosine and linear
  std::optional<double> weight_decay, clip;   // clip 0: none
  double clip_value = 0;                      // 0: none
  // beta2 of Adam, AdamW and Muon's AdamW: 0.95 where it is not given; Muon's scale: match_rms_adamw.
  optim::OptimizerSettings optimizer;
  // "dynamic", or a number; nothing: dynamic where the dtype is f16, else 1. The two below are a dynamic
  // one's: its first value, and how many applied steps let it grow; nothing: LossScale's.
  std::optional<std::string> loss_scale;
  std::optional<double> initial_scale;
  std::optional<std::size_t> scale_growth_interval;
  std::uint64_t seed = 1;
  std::string out;               // folder of checkpoints; empty: none are written
  std::uint64_t save_every = 0;  // 0: only at the end
  std::uint64_t keep = 2;        // how many of the newest stay; with validation the best one stays, too
  bool resume = false;
  std::uint64_t eval_every = 0, eval_batches = 8;  // not 0: also whenever a checkpoint is due
  int threads = 0;                                 // 0: the cores that this process may use
  // Files; empty: none. A trace is asked for on all ranks or on none, and is a file of rank 0 with all ranks.
  std::string metrics, trace, profile;
  std::string source;        // the file that these settings came from, if any, which outputs must not replace
  engine::PlanRequest plan;  // recompute and the like; its ranks follow from those below
  // The ranks that train the model together, of which `ranks` is this one; outlives the run. Null: the run
  // trains alone, or is planned. Sizes, disk space and threads are those of this rank; `accumulate` counts
  // the micro-batches of all ranks.
  comm::Communicator* communicator = nullptr;
  engine::RankOf ranks;
  // Along "pipeline" the model is cut into stages, of which each rank has one; along "tensor" each layer is,
  // of which each rank computes pieces; along "sequence" each sequence; along "data" ranks have the same.
  // Nothing: each rank has the whole model.
  std::optional<comm::Mesh> mesh;
  bool chooses_mesh = false;  // in place of a mesh: it is chosen by plans (mesh_choice.h)
  engine::PipelineOrder pipeline = engine::PipelineOrder::k1F1B;
  std::size_t chunks = 1;             // of consecutive blocks that each stage has
  std::optional<std::string> stages;  // the blocks of each stage, by chunk: "0-7,8-15"; nothing: chosen
  // With plan.reproducible: how many pieces layers are cut into at any number of ranks along "tensor".
  std::optional<std::size_t> grain;
  // What joins the ranks. Nothing: it is measured where there are ranks, and in a plan of a run that has not
  // begun, what they send counts as no time.
  std::optional<engine::Link> link;
  // What joins the ranks of one host, where a plan is told that; `link` is then what joins hosts. Nothing: as
  // `link` where there is one host, and otherwise what passes within a host takes no time.
  std::optional<engine::Link> host_link;
  // How many of them share this rank's machine, and how much of the cores there is this one's own. It has its
  // share of memory, threads and disk space that are left open.
  int ranks_here = 1;
  double share_of_cores = 1;
  std::uint64_t communication_bytes = 0;   // what the process holds for the communicator
  std::uint64_t communication_in_use = 0;  // those of them that it has in use before the run takes anything
};

// What is reported of each step. A skipped step's gradient norm is not finite, and its loss need not be.
struct StepReport {
  std::uint64_t step = 0, steps = 0;
  double loss = 0, learning_rate = 0, gradient_norm = 0, seconds = 0, tokens_per_second = 0;
  std::optional<double> validation_loss;
  std::optional<double> loss_scale;  // of this step; nothing where losses are not scaled
  bool skipped = false;
  std::uint64_t memory = 0, peak_memory = 0, predicted_peak = 0, budget = 0;  // resident bytes of the process
  std::uint64_t disk_read = 0, disk_written = 0;                              // bytes of this step
  // Bytes from other ranks since the step before, and those of them that ranks of other hosts sent.
  std::uint64_t received = 0, received_from_hosts = 0;
  double read_wait_seconds = 0, write_wait_seconds = 0, rank_wait_seconds = 0, optimizer_seconds = 0;
};

// A checkpoint that was written, or read.
struct CheckpointReport {
  std::string folder;
  std::uint64_t bytes = 0;
  double seconds = 0;
  std::vector<std::string> removed = {};            // older ones, for --keep, once it was written
  std::optional<engine::BestCheckpoint> best = {};  // of the run, by validation, once it was written
};

struct TrainEvents {
  std::function<void(const std::string& plan_table)> planned;
  std::function<void()> begun;  // the model has its values, and steps follow
  std::function<void(const StepReport&)> step;
  std::function<void(const CheckpointReport&)> saved, resumed;
  // Gets the JSON of docs/formats/profile.md if settings.profile is given, at the end or after an error.
  std::function<void(const std::string& json)> profiled;
  std::function<bool()> stop;  // asked between ops; true: save at the end of this step, and return
};

struct TrainResult {
  std::uint64_t steps = 0, skipped = 0;  // of the run; those that loss scaling skipped are steps too
  std::optional<double> last_loss;       // nothing where no step was left to do
  std::uint64_t peak_memory = 0, predicted_peak = 0;
  bool stopped = false;                        // by stop() before the last step
  std::optional<engine::BestCheckpoint> best;  // nothing where no checkpoint was validated
};

// What a run learns with, nothing left open.
struct Recipe {
  double learning_rate = 0;
  std::optional<double> adamw_learning_rate;  // nothing: learning_rate
  std::uint64_t warmup = 0;
  std::string schedule;
  double final_learning_rate = 0, clip = 0, weight_decay = 0;
  std::vector<std::string> defaults;  // command-line names of the settings above that nobody stated
};

// How a model is cut into the stages of a pipeline, and what is predicted of all of them.
struct PipelinePlan {
  engine::Pipeline pipeline;
  std::vector<engine::UnitRange> cut;  // by chunk, in the model's order
  std::vector<engine::UnitRange> units(int section) const;
  std::vector<std::string> names;  // by stage: of first and last units of its chunks
  int section = 0;                 // the stage that the plan is of
  engine::PipelineTime time;
  std::vector<std::uint64_t> peaks;  // bytes of host memory
  struct Received {  // bytes of a step that a rank gets: sums and parameters, borders, and within layers
    std::uint64_t data = 0, pipeline = 0, layers = 0;
  };
  std::vector<Received> received;  // by stage
  double bubble() const;           // the share of the step in which stages wait for others
};

// The mesh that was chosen, and those that were compared, the simplest first.
struct MeshChoice {
  struct Tried {
    comm::Mesh mesh;
    double seconds = 0;      // of a step of all ranks, where it fits
    std::uint64_t peak = 0;  // bytes of host memory, of the rank with the most
    double at_least = 0;     // seconds that a step would take; where that is too long, there is no plan
    std::string why_not;     // why it does not fit, or is not possible
    bool is_possible = true;
    std::uint64_t lacks = 0;  // bytes, where it does not fit
    bool fits() const { return peak > 0; }
  };
  comm::Mesh mesh;
  std::vector<Tried> tried;
};

// The plan alone, as `sluice plan` shows it.
struct PlanResult : engine::Planned {
  std::optional<PipelinePlan> pipeline;
  std::optional<MeshChoice> mesh_choice;  // where the mesh was left open; of a run's ranks, the first has it
  Recipe recipe;
  std::string recipe_text;             // for people, with the values that the run begins with
  std::uint64_t checkpoint_bytes = 0;  // room that one checkpoint needs
  std::uint64_t trace_bytes = 0;       // of --trace and --profile; a part of budget.base
  // For a plan of another machine: the file that describes it, and what that file lacks.
  std::string machine;
  std::vector<std::string> not_known;
};
PlanResult plan_training(const TrainSettings& settings);
// The table for people: the plan's own, the recipe, and the room that checkpoints need.
std::string plan_text(const PlanResult& result);

// Plans, loads or initialises or resumes, trains, saves. Throws Error.
TrainResult train(const TrainSettings& settings, const TrainEvents& events);

}  // namespace sluice::models
