#include "models/trainer.h"

#include "allocator/memory.h"
#include "core/bytes.h"
#include "core/error.h"
#include "core/log.h"
#include "engine/checkpoint/checkpoint.h"
#include "models/training_run.h"
#include "models/training_setup.h"
#include "models/weights.h"

namespace sluice::models {
namespace {

// The checkpoint to go on from; nothing where the run begins. Throws where --out holds a run that was not
// asked for.
std::optional<std::string> find_checkpoint(const TrainSettings& settings) {
  if (settings.out.empty()) return std::nullopt;
  const engine::CheckpointList list = engine::list_checkpoints(settings.out);
  if (!settings.resume) {
    if (list.whole.empty() && list.broken.empty()) return std::nullopt;
    fail(ErrorCode::kInvalidArgument,
         "--out '{}' holds a run already ('{}'); go on with it by --resume, or name another folder",
         settings.out, list.whole.empty() ? list.broken.front().path : list.whole.back().path);
  }
  for (const auto& broken : list.broken)
    log().warn("'{}' is not a whole checkpoint: {}", broken.path, broken.reason);
  if (list.whole.empty()) {
    if (!list.broken.empty())
      fail(ErrorCode::kCorrupt,
           "--out '{}' holds no whole checkpoint to resume from; see the warnings, or name another folder",
           settings.out);
    log().info("'{}' holds no checkpoint yet: the run begins at its start", settings.out);
    return std::nullopt;
  }
  return list.whole.back().path;
}

void resume_from(TrainingRun& run, const std::string& checkpoint) {
  try {
    run.resume(checkpoint);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCorrupt) throw;
    fail(ErrorCode::kCorrupt, "{}; move '{}' away to resume from the checkpoint before it", error.what(),
         checkpoint);
  }
}

}  // namespace

PlanResult plan_training(const TrainSettings& settings) { return prepare(settings).plan; }

std::string plan_text(const PlanResult& result) {
  std::string text = engine::to_text(result.plan, result.profile, result.budget);
  if (!text.ends_with('\n')) text += '\n';
  return text + fmt::format("a checkpoint takes {}\n", format_size(result.checkpoint_bytes));
}

TrainResult train(const TrainSettings& settings, const TrainEvents& events) {
  check_settings(settings);
  const bool begins = !find_checkpoint(settings);  // before the work of planning
  allocator::install_touch_reporter();
  Setup setup = prepare(settings);
  if (begins && !is_preset(settings.model))
    check_hugging_face_folder(*setup.tools->io, settings.model, setup.config,
                              engine::Layout(setup.model->units()));
  if (events.planned) events.planned(plan_text(setup.plan));
  std::optional<engine::RunLock> lock;
  if (!settings.out.empty()) {
    lock.emplace(settings.out);
    engine::remove_leftovers(settings.out);
  }
  const std::optional<std::string> checkpoint = find_checkpoint(settings);
  TrainingRun run(setup, events);
  if (checkpoint) {
    resume_from(run, *checkpoint);
  } else {
    run.load_initial();
  }
  return run.train();
}

}  // namespace sluice::models
