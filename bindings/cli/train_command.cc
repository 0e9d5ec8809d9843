#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "bindings/cli/commands.h"
#include "bindings/cli/launched_ranks.h"
#include "bindings/cli/local_ranks.h"
#include "bindings/cli/profile_page.h"
#include "bindings/cli/progress.h"
#include "bindings/cli/signals.h"
#include "core/bytes.h"
#include "core/error.h"
#include "engine/ranks/agreement.h"
#include "models/run/machine_plan.h"
#include "models/run/mesh_choice.h"
#include "models/run/pipeline_plan.h"
#include "models/run/rank_files.h"
#include "models/run/recipe.h"

namespace sluice::cli {
namespace {

std::string stopper() {
  const std::string signal = StopSignals::name();
  return signal.empty() ? "a signal to another rank" : signal;
}

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
    fmt::print(out, "stopped by {} after step {}; {}\n", stopper(), result.steps,
               settings.out.empty() ? "nothing was saved, since there is no --out"
                                    : "there was nothing new to save");
  } else {
    fmt::print(out, "stopped by {}: saved after step {} of {}; go on with --resume\n", stopper(),
               result.steps, settings.steps);
  }
}

// Describes what happened to the run's other checkpoints.
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

// Stops the run if its caller is killed before it could stop it.
void stop_with(std::uint64_t caller) {
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (static_cast<std::uint64_t>(::getppid()) != caller) ::kill(::getpid(), SIGTERM);  // it has ended already
}

std::string json_line(const models::PlanResult& result) {
  Json json = engine::to_json(result.plan, result.profile, result.budget);
  json["checkpoint_bytes"] = result.checkpoint_bytes;
  if (result.mesh_choice) json["meshes"] = models::to_json(*result.mesh_choice);
  if (result.pipeline) json["pipeline"] = models::to_json(*result.pipeline);
  json["recipe"] = models::to_json(result.recipe);
  json["recipe"]["defaults"] = result.recipe.defaults;
  if (!result.machine.empty()) json["machine"] = {{"file", result.machine}, {"not_known", result.not_known}};
  json["version"] = 1;
  return json_text(json);
}

// Returns the number of ranks that the flags request; nothing where a launcher decides.
std::optional<int> asked_ranks(const TrainOptions& options, const models::TrainSettings& settings) {
  if (options.ranks || !settings.mesh) return options.ranks;
  return settings.mesh->ranks();
}

[[noreturn]] void refuse_unknown_ranks() {
  fail(ErrorCode::kInvalidArgument,
       "--mesh auto chooses among the meshes of so many ranks, and nothing says how many: give --ranks N "
       "(mpirun and srun say it for a run)");
}

// Returns the ranks of the run, or null for a run of one rank.
std::unique_ptr<Ranks> join_ranks(const TrainOptions& options, models::TrainSettings settings,
                                  std::optional<int> asked) {
  const comm::Deadlines deadlines{std::chrono::seconds(options.silence),
                                  std::chrono::seconds(options.patience)};
  if (options.ranks == 1) return nullptr;
  if (LocalRanks::own_rank() > 0 && asked) return std::make_unique<LocalRanks>(*asked, deadlines);
  const std::optional<comm::MpiLauncher> launcher = comm::find_mpi_launcher();
  if (options.chooses_mesh() && !asked && !launcher) refuse_unknown_ranks();
  if (!launcher || launcher->ranks == 1) {
    if (asked.value_or(1) == 1) return nullptr;
    settings.ranks = {0, *asked};
    settings.ranks_here = *asked;
    models::check_request(settings);  // before there are other ranks, which would report the same error
    return std::make_unique<LocalRanks>(*asked, deadlines);
  }
  const auto refuse_others = [&](int ranks) {
    if (options.ranks && ranks != 0 && *options.ranks != ranks)
      fail(ErrorCode::kInvalidArgument,
           "--ranks {}: {} has started {} ranks; leave the flag out, or give 1 if each is to train alone",
           *options.ranks, launcher->name, ranks);
  };
  refuse_others(launcher->ranks);
  auto ranks = std::make_unique<LaunchedRanks>(*launcher, deadlines);
  refuse_others(ranks->communicator().size());  // not every launcher has given the number before
  return ranks;
}

// Returns a sink for the output to the user of ranks other than 0, which rank 0 writes, too.
using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;
File nowhere() {
  File file(std::fopen("/dev/null", "w"), std::fclose);
  if (file == nullptr) fail(ErrorCode::kIo, "/dev/null could not be opened: {}", errno_text(errno));
  return file;
}

// Plans for rank 0 of the requested ranks, on as many hosts as requested.
void plan_for_ranks(const TrainOptions& options, models::TrainSettings& settings) {
  const std::optional<int> asked = asked_ranks(options, settings);
  const int ranks = asked.value_or(1), hosts = options.hosts.value_or(1);
  if (options.hosts && !asked)
    fail(ErrorCode::kInvalidArgument, "--hosts {}: say with --ranks how many ranks they share", hosts);
  if (options.chooses_mesh() && !asked) refuse_unknown_ranks();
  if (hosts < 1 || ranks % hosts != 0)
    fail(ErrorCode::kInvalidArgument, "--hosts {}: {} ranks cannot be shared evenly by them", hosts, ranks);
  if (hosts > 1 && settings.host_link && !settings.link)
    fail(ErrorCode::kInvalidArgument,
         "--link-host says what joins the ranks of a host, and nothing what joins the {} hosts: give --link, "
         "too",
         hosts);
  if (ranks == 1) return;
  settings.ranks_here = ranks / hosts;
  settings.share_of_cores = 1.0 / settings.ranks_here;
  settings.ranks = {0, ranks};
  for (int rank = 0; rank < ranks && hosts > 1; ++rank)
    settings.ranks.hosts.push_back(rank / settings.ranks_here);
  settings.communication_bytes =
      hosts == 1 ? LocalRanks::bytes(ranks) : LaunchedRanks::bytes(ranks, settings.ranks_here);
}

}  // namespace

void run_train(const models::TrainSettings& settings, const TrainOptions& options,
               std::unique_ptr<Ranks>& ranks, std::FILE* out) {
  if (!options.machine.empty())
    fail(ErrorCode::kInvalidArgument,
         "--machine '{}': a run trains on this machine; use sluice plan --machine to plan for another",
         options.machine);
  models::TrainSettings own = settings;
  File unseen(nullptr, std::fclose);
  ranks = join_ranks(options, settings, asked_ranks(options, settings));
  if (ranks != nullptr) {
    own.ranks_here = ranks->ranks_here();
    own.share_of_cores = ranks->share_of_cpus();
    own.communicator = &ranks->communicator();
    own.ranks = engine::rank_of(*own.communicator);
    own.communication_bytes = ranks->bytes();
    own.communication_in_use = ranks->bytes_in_use();
    if (const int rank = own.communicator->rank(); rank > 0) {
      own.metrics = models::place_of_rank(settings.metrics, rank);
      own.profile = models::place_of_rank(settings.profile, rank);
      unseen = nowhere();
      out = unseen.get();
    }
  }
  if (options.caller != 0 && LocalRanks::own_rank() == 0) stop_with(options.caller);
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
    write_profile(own.profile, json);
    progress.message("the profile was written to " + own.profile);
  };
  events.begun = [] { StopSignals::begin_steps(); };
  events.stop = [] { return StopSignals::requested(); };
  const models::TrainResult result = models::train(own, events);
  progress.finish();
  print_end(result, settings, out);
}

void run_plan(const models::TrainSettings& given, const TrainOptions& options, std::FILE* out) {
  models::TrainSettings settings = given;
  plan_for_ranks(options, settings);
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
