#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "bindings/cli/commands.h"
#include "bindings/cli/profile_page.h"
#include "bindings/cli/progress.h"
#include "bindings/cli/signals.h"
#include "core/bytes.h"
#include "core/error.h"
#include "models/run/machine_plan.h"
#include "models/run/recipe.h"

namespace sluice::cli {
namespace {

void print_end(const models::TrainResult& result, const models::TrainSettings& settings, std::FILE* out) {
  const double error =
      result.predicted_peak == 0
          ? 0
          : 100.0 *
                (static_cast<double>(result.peak_memory) / static_cast<double>(result.predicted_peak) - 1.0);
  fmt::print(out, "peak memory {} measured, {} predicted ({:+.1f}%)\n", format_size(result.peak_memory),
             format_size(result.predicted_peak), error);
  if (result.best)
    fmt::print(out, "best by validation: {} (loss {:.4f})\n", result.best->folder,
               result.best->validation_loss);
  if (!result.stopped) {
    const std::string skipped =
        result.skipped == 0 ? "" : fmt::format(" ({} of them skipped for the loss scale)", result.skipped);
    fmt::print(out, "{} steps done{}, {}\n", result.steps, skipped,
               result.last_loss
                   ? fmt::format("last loss {:.4f}", *result.last_loss)
                   : std::string("all of them by earlier runs, so there was nothing left to do"));
  } else if (settings.out.empty() || result.steps == 0) {
    fmt::print(out, "stopped by {} after step {}; {}\n", StopSignals::name(), result.steps,
               settings.out.empty() ? "nothing was saved, since there is no --out"
                                    : "there was nothing new to save");
  } else {
    fmt::print(out, "stopped by {}: saved after step {} of {}; go on with --resume\n", StopSignals::name(),
               result.steps, settings.steps);
  }
}

// Describes what became of the run's other checkpoints.
std::string fate_of_others(const models::CheckpointReport& report) {
  std::string text;
  for (const std::string& folder : report.removed)
    text += (text.empty() ? "; --keep removed " : ", ") + std::filesystem::path(folder).filename().string();
  if (report.best)
    text += fmt::format("; the best by validation is {}",
                        report.best->folder == report.folder
                            ? "this one"
                            : "that of step " + std::to_string(report.best->step));
  return text;
}

// Lets the run stop where its caller is killed before it could stop it.
void stop_with(std::uint64_t caller) {
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (static_cast<std::uint64_t>(::getppid()) != caller) ::kill(::getpid(), SIGTERM);  // it has ended already
}

std::string json_line(const models::PlanResult& result) {
  Json json = engine::to_json(result.plan, result.profile, result.budget);
  json["checkpoint_bytes"] = result.checkpoint_bytes;
  json["recipe"] = models::to_json(result.recipe);
  json["recipe"]["defaults"] = result.recipe.defaults;
  if (!result.machine.empty()) json["machine"] = {{"file", result.machine}, {"not_known", result.not_known}};
  json["version"] = 1;
  return json_text(json);
}

}  // namespace

void run_train(const models::TrainSettings& settings, const TrainOptions& options, std::FILE* out) {
  if (!options.machine.empty())
    fail(ErrorCode::kInvalidArgument,
         "--machine '{}': a run trains on this machine; use sluice plan --machine to plan for another",
         options.machine);
  const StopSignals signals;
  if (options.caller != 0) stop_with(options.caller);
  Progress progress(out, progress_style(options.progress, out));
  models::TrainEvents events;
  events.planned = [&](const std::string& table) { progress.message(table); };
  events.step = [&](const models::StepReport& report) { progress.step(report); };
  const auto tell = [&](const char* what, const models::CheckpointReport& report) {
    progress.message(fmt::format(
        "{} {} ({} in {:.2f} s, {:.2f} GB/s){}", what, report.folder, format_size(report.bytes),
        report.seconds, static_cast<double>(report.bytes) / 1e9 / report.seconds, fate_of_others(report)));
  };
  events.saved = [&](const models::CheckpointReport& report) { tell("saved", report); };
  events.resumed = [&](const models::CheckpointReport& report) { tell("resumed from", report); };
  events.profiled = [&](const std::string& json) {
    write_profile(settings.profile, json);
    progress.message("the profile was written to " + settings.profile);
  };
  events.stop = [] { return StopSignals::requested(); };
  const models::TrainResult result = models::train(settings, events);
  progress.finish();
  print_end(result, settings, out);
}

void run_plan(const models::TrainSettings& settings, const TrainOptions& options, std::FILE* out) {
  const models::PlanResult result =
      options.machine.empty() ? models::plan_training(settings)
                              : models::plan_for_machine(settings, engine::read_machine(options.machine));
  if (options.json) {
    fmt::print(out, "{}\n", json_line(result));
  } else {
    fmt::print(out, "{}", models::plan_text(result));
  }
}

}  // namespace sluice::cli
