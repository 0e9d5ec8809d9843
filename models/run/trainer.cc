#include "models/run/trainer.h"

#include "allocator/memory.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/log.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/machine/process.h"
#include "models/families/weights.h"
#include "models/run/mesh_choice.h"
#include "models/run/pipeline_plan.h"
#include "models/run/run_ranks.h"
#include "models/run/training_run.h"
#include "models/run/training_setup.h"
#include "offload/records.h"

namespace sluice::models {
namespace {

// Throws where the checkpoints in --out do not allow the run.
void check_out(const TrainSettings& settings) {
  if (settings.out.empty()) return;
  const engine::CheckpointList list = engine::list_checkpoints(settings.out);
  if (settings.resume) {
    if (!list.whole.empty() && list.whole.back().step > settings.steps)
      fail(ErrorCode::kInvalidArgument, "'{}' is at step {}, beyond --steps {}; give more steps",
           list.whole.back().path, list.whole.back().step, settings.steps);
    return;
  }
  if (list.whole.empty() && list.broken.empty()) return;
  if (list.whole.empty())
    fail(ErrorCode::kInvalidArgument,
         "--out '{}' holds '{}', which is no whole checkpoint; move it away, or name another folder",
         settings.out, list.broken.front().path);
  fail(ErrorCode::kInvalidArgument,
       "--out '{}' holds a run already ('{}'); go on with it by --resume, or name another folder",
       settings.out, list.whole.back().path);
}

// Returns the checkpoint to resume from; nothing for a new run.
std::optional<std::string> find_checkpoint(const TrainSettings& settings) {
  if (settings.out.empty() || !settings.resume) return std::nullopt;
  std::optional<std::string> found = engine::newest_checkpoint(settings.out);
  if (!found) log().info("'{}' holds no checkpoint yet: the run begins at its start", settings.out);
  return found;
}

void resume_from(TrainingRun& run, const std::string& checkpoint) {
  try {
    run.resume(checkpoint);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCorrupt) throw;
    engine::fail_damaged(error, checkpoint);
  }
}

}  // namespace

void check_request(const TrainSettings& settings) {
  check_settings(settings);
  if (settings.data.empty())
    fail(ErrorCode::kInvalidArgument, "--data is missing: name text files or folders, or .bin token files");
  if (settings.memory != 0) engine::check_group_limit(settings.memory, settings.ranks_here, "--memory is");
  check_out(settings);
}

PlanResult plan_training(const TrainSettings& settings) { return prepare(settings).plan; }

std::string plan_text(const PlanResult& result) {
  std::string text;
  if (!result.machine.empty()) text = fmt::format("for the machine of {}, not this one\n", result.machine);
  text += engine::to_text(result.plan, result.profile, result.budget);
  if (!text.ends_with('\n')) text += '\n';
  if (result.mesh_choice) text += to_text(*result.mesh_choice);
  if (result.pipeline) text += to_text(*result.pipeline, result.profile);
  if (result.pipeline && result.plan.ranks.size == 1 && !result.rates.link)
    text += "the link          is not known, so that what is sent counts as no time; give --link\n";
  text += result.recipe_text;
  text += fmt::format("a checkpoint takes {}\n", format_size(result.checkpoint_bytes));
  const std::uint64_t extra = result.checkpoint_buffers + result.trace_bytes;
  text += fmt::format("the process (base): {} with its libraries and a reserve",
                      format_size(result.budget.base - extra));
  if (result.checkpoint_buffers > 0)
    text +=
        fmt::format(", {} for the files of checkpoints and weights", format_size(result.checkpoint_buffers));
  if (result.trace_bytes > 0)
    text += fmt::format(", {} of --trace or --profile", format_size(result.trace_bytes));
  for (const std::string& missing : result.not_known)
    text += fmt::format("\nnot known of the machine: {}", missing);
  return text + "\n";
}

namespace {

TrainResult train_as_planned(Setup& setup, RunRanks& ranks, const TrainEvents& events) {
  const TrainSettings& settings = setup.settings;
  engine::check_machine_memory(setup.plan.plan.peak_memory, settings.ranks_here);
  if (!settings.resume && !setup.first_values)
    check_hugging_face_folder(*setup.tools->io, settings.model, setup.config,
                              engine::Layout(setup.model->units()));
  if (events.planned && ranks.is_first()) events.planned(plan_text(setup.plan));
  std::optional<engine::RunLock> lock;
  if (!settings.out.empty() && ranks.is_first()) {
    lock.emplace(settings.out);
    if (offload::lies_in_memory(settings.out))
      log().warn(
          "--out '{}' lies in memory (tmpfs or ramfs): no budget counts the {} that each checkpoint takes of "
          "it; name a folder on a disk",
          settings.out, format_size(setup.plan.checkpoint_bytes));
    check_out(settings);  // a run may have ended meanwhile
    for (const std::string& leftover : engine::remove_leftovers(settings.out))
      log().warn("'{}', which a killed run left half written or half deleted, was removed", leftover);
  }
  // The other ranks wait here until rank 0 has the folder for itself.
  const std::string checkpoint =
      ranks.from_first(ranks.is_first() ? find_checkpoint(settings).value_or("") : "");
  if (!checkpoint.empty())
    ranks.check_all_read(checkpoint + "/" + engine::kManifestFile, "goes on from, by --resume");
  TrainingRun run(setup, ranks, events);
  try {
    if (!checkpoint.empty())
      resume_from(run, checkpoint);
    else
      run.load_initial();
    return run.train();
  } catch (const std::exception& error) {
    ranks.fail(error);  // before the run is destroyed, which waits for calls that the others have begun
    throw;
  }
}

}  // namespace

TrainResult train(const TrainSettings& settings, const TrainEvents& events) {
  RunRanks given(settings);
  try {
    check_request(settings);
    allocator::install_touch_reporter();
    Setup setup = prepare(settings);
    RunRanks ranks(setup.settings);  // its mesh may have been chosen just now
    return train_as_planned(setup, ranks, events);
  } catch (const std::exception& error) {
    given.fail(error);  // the other ranks end with this error, too
    throw;
  }
}

}  // namespace sluice::models
