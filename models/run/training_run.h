#pragma once
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "allocator/memory.h"
#include "core/trace.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/steps/assembly.h"
#include "engine/steps/scheduled_engine.h"
#include "models/model/message_axis.h"
#include "models/model/message_neighbours.h"
#include "models/model/model.h"
#include "models/run/learning_rate.h"
#include "models/run/metrics.h"
#include "models/run/profile.h"
#include "models/run/rank_traces.h"
#include "models/run/run_ranks.h"
#include "models/run/training_setup.h"
#include "offload/records.h"

namespace sluice::models {

// One run, from the allocation of its memory on. Thread rule: one thread at a time.
class TrainingRun {
 public:
  // Allocates all memory and disk space. All arguments outlive this.
  TrainingRun(Setup& setup, RunRanks& ranks, const TrainEvents& events);
  ~TrainingRun();
  TrainingRun(const TrainingRun&) = delete;
  TrainingRun& operator=(const TrainingRun&) = delete;

  // Load the initial values (random, or those of a Hugging Face folder), or those of a checkpoint. A run of
  // one rank returns early where a stop is requested; train() then does nothing.
  void load_initial();
  void resume(const std::string& checkpoint);

  TrainResult train();

 private:
  // The buffer for reading values. Larger is faster, so it uses the activations' memory where that is large,
  // else `charged` bytes of its own.
  struct LoadingMemory {
    allocator::Region own;
    std::span<std::byte> bytes;
  };
  LoadingMemory loading_memory(std::size_t charged);
  Place place();
  LayerRanks layer_ranks();
  void serve_ranks();
  bool load_units(const engine::UnitSource& source);
  void begin_metrics();
  void resume_metrics();
  void add_metrics(const StepReport& report);
  void save_trace();
  void save_profile(const std::string& error);
  std::string profile_text(const std::string& error);
  void save_reports_after_error(const std::string& error) noexcept;
  void check_room() const;
  void check_folder();
  StepReport step();
  double run_step(std::uint64_t step, StepReport& report);
  double compute(std::uint64_t step, float scale);
  engine::StepResult apply_or_skip(double loss, bool& skipped);
  void describe(StepReport& report);
  CheckpointReport checkpoint_report(std::chrono::steady_clock::time_point begin) const;
  std::optional<double> evaluate_if_due();  // nothing where the run is to stop
  Json judge() const;                       // how checkpoints are validated
  void run_steps();
  void save();
  std::string last_checkpoint() const;
  bool stop_requested();
  bool stops() { return ranks_.size() == 1 ? stop_requested() : stops_; }
  bool due(std::uint64_t every) const { return every != 0 && step_ % every == 0; }

  Setup& setup_;
  RunRanks& ranks_;
  const TrainSettings& settings_;
  const TrainEvents& events_;
  LearningRate learning_rate_;
  LossScale loss_scale_;
  Trace::Clock::time_point origin_ = Trace::Clock::now();
  StepSeries series_;
  RankTraces traces_;  // constructed before anything is traced
  engine::Assembly<engine::ScheduledEngine> assembly_;
  engine::ScheduledEngine& engine_ = assembly_.engine();
  std::unique_ptr<Runner> runner_;
  std::unique_ptr<MessageNeighbours> neighbours_;  // destroyed before the memory of its messages
  std::unique_ptr<MessageAxis> tensor_, sequence_;
  engine::Waits waits_{assembly_.trace()};  // of the run itself, without its engine's and messages'
  double waits_within_waits_ = 0;           // seconds of the engine's waits within them
  comm::Transport::Counters traffic_;       // with other ranks, up to the last step
  std::optional<MetricsFile> metrics_;
  std::string run_id_;
  std::uint64_t step_ = 0, saved_step_ = 0, skipped_ = 0, next_sample_ = 0;
  bool in_step_ = false;
  std::string checkpoint_;  // the last one
  bool stop_ = false;       // whether this rank is asked to stop
  bool stops_ = false;      // the ranks have agreed to stop
  offload::RecordStore::Counters disk_counters_;
  engine::Engine::Counters engine_counters_;
  std::optional<double> last_loss_;
  Json validation_ = nullptr;  // its record for a checkpoint of this step
};

// A run's position, as a checkpoint records it.
struct RunPosition {
  std::string run_id;
  std::uint64_t step = 0, skipped = 0, next_sample = 0;
  Json loss_scale = nullptr;  // its state; null: fixed
  Json validation = nullptr;  // validation_record(); null: not measured after this step
};
Json run_record(const Setup& setup, const RunPosition& position);
// Reads the run's record in a checkpoint's manifest. Throws as Manifest::parse(), and Error(kInvalidArgument)
// for a record of another version.
Json read_run_record(const std::string& checkpoint);
// The data on which a checkpoint's model was trained, as recorded; unknown for other folders.
struct LearnedFrom {
  bool bytes = false;                   // its tokens were bytes
  std::optional<std::uint64_t> length;  // tokens of the longest sample
};
// Throws as Manifest::parse().
LearnedFrom learned_from(const std::string& folder);
// Returns the differences of two records, by name: "seed was 3 and is 4".
std::vector<std::string> differences(const Json& recorded, const Json& now);
// Throws Error(kInvalidArgument), with all names, where settings differ that must not differ in a resumed
// run. Warns of differences that may change the bits: another CPU, number of threads or hyperparameter.
void compare_run_record(const Json& recorded, const Json& now, const std::string& checkpoint);

}  // namespace sluice::models
